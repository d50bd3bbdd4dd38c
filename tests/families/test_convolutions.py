"""Our encoders' convolutions: the host's bits, the long ones in slices of time."""

import copy
import shutil

import pytest
import torch
from torch import nn
from transformers.models.mimi.configuration_mimi import MimiConfig
from transformers.models.mimi.modeling_mimi import MimiEncoder

from tests.torch_threads import on_threads
from vllm_tts_cache.families.fish_speech import encoders as fish
from vllm_tts_cache.families.fish_speech.codec import build_half
from vllm_tts_cache.families.fish_speech.family import FAMILY as FISH
from vllm_tts_cache.families.fish_speech.sizes import read_sizes
from vllm_tts_cache.families.networks.dac.encoder import (
    fix_weight_norms,
    read_codec_file,
)
from vllm_tts_cache.families.networks.qwen3_codec import encoder as qwen3
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint

RATE_HZ = 24_000
SAMPLES_PER_FRAME = 2_048  # of Fish Speech, whose clips are filled up to whole ones
# One slice to its last sample; two, the second as short and as long as it may be; many;
# and, of Qwen3-TTS, lengths that are no whole stride of one or of any layer.
LENGTHS = {
    "fish": [n * SAMPLES_PER_FRAME for n in (1, 2, 42, 43, 44, 64, 65, 87, 130)],
    "qwen3": [1, 959, 960, 961, 33_333, 47_999, 48_000, 48_001, 95_999, 96_000, 96_001],
}
LENGTHS["qwen3"] += [100_004, 143_999, 144_000, 144_020, 250_007]


def mimi(num_filters, hidden_size, **options):
    torch.manual_seed(0)
    config = MimiConfig(num_filters=num_filters, hidden_size=hidden_size, **options)
    encoder = MimiEncoder(config).eval().requires_grad_(False)
    for module in encoder.modules():
        if isinstance(module, nn.Conv1d):
            fan_in = module.in_channels * module.kernel_size[0]
            nn.init.normal_(module.weight, std=1.6 * fan_in**-0.5)
    return encoder


def of_qwen3(num_filters, hidden_size):
    """Ours and the host's, of the same weights."""
    hosts = mimi(num_filters, hidden_size)
    return qwen3.SlicedEncoder(hosts, RATE_HZ), hosts


def of_fish(checkpoint):
    path = checkpoint / "codec.pth"
    state = read_codec_file(path)
    codec, _ = build_half("encoding", read_sizes(checkpoint), state, path=str(path))
    fix_weight_norms(codec)
    return fish.SlicedEncoder(copy.deepcopy(codec.encoder)), codec.encoder


@pytest.fixture(scope="module")
def encoders(tiny):
    return {"fish": of_fish(tiny(FISH)), "qwen3": of_qwen3(4, 64)}


def released_fish(tmp_path):
    checkpoint = TinyCheckpoint(FISH, encoders="real").write(tmp_path / "real")
    pair = of_fish(checkpoint)
    shutil.rmtree(checkpoint)  # 1.5 GB, which pytest would keep
    return pair


RELEASED_SIZES = {"fish": released_fish, "qwen3": lambda _: of_qwen3(64, 512)}


def assert_same(pair, num_samples, num_threads):
    ours, hosts = pair
    generator = torch.Generator().manual_seed(num_samples)
    samples = 0.1 * torch.randn(1, 1, num_samples, generator=generator)
    with on_threads(num_threads), torch.inference_mode():
        assert torch.equal(ours(samples), hosts(samples)), num_samples


@pytest.mark.parametrize("name", LENGTHS)
def test_the_embeddings_are_the_hosts_to_the_bit(encoders, name):
    for num_samples in LENGTHS[name]:
        assert_same(encoders[name], num_samples, num_threads=1)
    assert_same(encoders[name], 65 * SAMPLES_PER_FRAME, num_threads=2)


@pytest.mark.long
@pytest.mark.parametrize("name", LENGTHS)
def test_they_are_with_the_released_sizes(tmp_path, name):
    pair = RELEASED_SIZES[name](tmp_path)
    assert_same(pair, 70 * SAMPLES_PER_FRAME, num_threads=2)
    for num_samples in LENGTHS[name][::2]:
        assert_same(pair, num_samples, num_threads=1)


@pytest.mark.parametrize(
    "options", [{"use_causal_conv": False}, {"pad_mode": "reflect"}]
)
def test_one_that_looks_ahead_or_pads_otherwise_is_left_whole(options):
    assert qwen3.can_be_sliced(mimi(4, 64))
    assert not qwen3.can_be_sliced(mimi(4, 64, **options))
