"""Our encoder's convolutions: the host's bits, without its scripts and in slices."""

import copy
import shutil

import pytest
import torch
from torch import nn
from vllm_omni.model_executor.models.fish_speech.dac_modules.layers import Snake1d

from tests.families.fish_speech.written import write_fish_speech_checkpoint
from tests.torch_threads import on_threads
from vllm_tts_cache.families.fish_speech.codec import (
    RELEASED,
    CodecSizes,
    build_codec,
    read_sizes,
)
from vllm_tts_cache.families.fish_speech.codec_convolutions import (
    SlicedEncoder,
    Snake,
)
from vllm_tts_cache.families.fish_speech.codec_halves import (
    build_encoding_half,
)
from vllm_tts_cache.families.fish_speech.tiny.sizes import CheckpointOptions
from vllm_tts_cache.families.networks.dac.file import fix_weight_norms, read_codec_file

SAMPLES_PER_FRAME = 2_048
# One slice to its last frame; two, the second as short and as long as it may be; many.
NUM_FRAMES = (1, 2, 21, 42, 43, 44, 64, 65, 87, 130, 215)
# Torch computes some convolutions over fewer numbers on a CPU by another kernel.
FEWEST_NUMBERS = 20_481


@pytest.mark.parametrize("shape", [(1, 8, 1), (1, 64, 33), (2, 512, 700)])
def test_the_activation_has_the_hosts_bits(shape):
    torch.manual_seed(0)
    host = Snake1d(shape[1]).requires_grad_(False)
    nn.init.uniform_(host.alpha, 0.05, 3)
    x = 5 * torch.randn(shape)
    with torch.inference_mode():
        assert torch.equal(Snake(host.alpha)(x), host(x))


def encoders_of(checkpoint):
    """Ours and the host's, of the same weights."""
    path = checkpoint / "codec.pth"
    state = read_codec_file(path)
    codec, _ = build_encoding_half(read_sizes(checkpoint), state, path=str(path))
    fix_weight_norms(codec)
    return SlicedEncoder(copy.deepcopy(codec.encoder)), codec.encoder


@pytest.fixture(scope="module")
def tiny_encoders(fish_speech_checkpoint):
    return encoders_of(fish_speech_checkpoint)


@pytest.mark.parametrize("num_frames", NUM_FRAMES)
def test_the_latents_are_the_hosts_to_the_bit(tiny_encoders, num_frames):
    ours, hosts = tiny_encoders
    assert_same(ours, hosts, num_frames, num_threads=1)


def test_they_are_on_two_threads(tiny_encoders):
    assert_same(*tiny_encoders, num_frames=65, num_threads=2)


@pytest.mark.long
def test_the_latents_are_the_hosts_to_the_bit_with_the_released_sizes(tmp_path):
    checkpoint = write_fish_speech_checkpoint(
        tmp_path / "real", CheckpointOptions(encoders="real")
    )
    encoders = encoders_of(checkpoint)
    shutil.rmtree(checkpoint)  # 1.5 GB, which pytest would keep
    assert_same(*encoders, num_frames=44, num_threads=2)
    for num_frames in (7, 43, 44, 64, 65, 141):
        assert_same(*encoders, num_frames, num_threads=1)


def assert_same(ours, hosts, num_frames, num_threads):
    generator = torch.Generator().manual_seed(num_frames)
    samples = 0.1 * torch.randn(
        1, 1, num_frames * SAMPLES_PER_FRAME, generator=generator
    )
    with on_threads(num_threads), torch.inference_mode():
        assert torch.equal(ours(samples), hosts(samples)), num_frames


@pytest.mark.parametrize("sizes", [RELEASED, CodecSizes(encoder_dim=8)])
def test_no_convolution_of_a_slice_is_so_short_that_another_kernel_computes_it(sizes):
    with torch.device("meta"):
        encoder = SlicedEncoder(build_codec(sizes).encoder)
        clip = torch.zeros(1, 1, 3 * encoder.num_samples)
    seen = []
    for module in encoder.sliced.modules():
        if isinstance(module, nn.Conv1d):
            module.register_forward_pre_hook(
                lambda _, args: seen.append(args[0].numel())
            )
    with torch.inference_mode():
        encoder(clip)
    assert len(seen) == 3 * (1 + 4 * 7)
    assert min(seen) >= FEWEST_NUMBERS


def test_a_slice_is_about_a_second_of_whole_latents():
    with torch.device("meta"):
        encoder = SlicedEncoder(build_codec(RELEASED).encoder)
    assert encoder.num_samples == 86 * 512
    assert not any(isinstance(m, Snake1d) for m in encoder.modules())
