"""Our encoder's convolutions: the host's bits, the long ones in slices of time."""

import pytest
import torch
from torch import nn
from transformers.models.mimi.configuration_mimi import MimiConfig
from transformers.models.mimi.modeling_mimi import MimiEncoder

from tests.torch_threads import on_threads
from vllm_tts_cache.families.networks.qwen3_codec.convolutions import (
    SlicedEncoder,
    can_be_sliced,
)
from vllm_tts_cache.families.qwen3_tts.encoders import load_reference_encoders

RATE_HZ = 24_000
# One slice to its last sample; two, the second as short and as long as it may be; many;
# and lengths that are no whole stride of one or of any layer.
NUM_SAMPLES = (1, 959, 960, 961, 33_333, 47_999, 48_000, 48_001, 95_999, 96_000)
NUM_SAMPLES += (96_001, 100_004, 143_999, 144_000, 144_020, 250_007)
# Torch computes some convolutions over fewer numbers on a CPU by another kernel.
FEWEST_NUMBERS = 20_481


def host_encoder(num_filters, hidden_size, **options):
    torch.manual_seed(0)
    config = MimiConfig(num_filters=num_filters, hidden_size=hidden_size, **options)
    encoder = MimiEncoder(config).eval().requires_grad_(False)
    for module in encoder.modules():
        if isinstance(module, nn.Conv1d):
            fan_in = module.in_channels * module.kernel_size[0]
            nn.init.normal_(module.weight, std=1.6 * fan_in**-0.5)
    return encoder


@pytest.fixture(scope="module")
def tiny_encoder():
    return host_encoder(num_filters=4, hidden_size=64)


@pytest.mark.parametrize("num_samples", NUM_SAMPLES)
def test_the_embeddings_are_the_hosts_to_the_bit(tiny_encoder, num_samples):
    assert_same(tiny_encoder, num_samples, num_threads=1)


def test_they_are_on_two_threads(tiny_encoder):
    assert_same(tiny_encoder, num_samples=144_020, num_threads=2)


@pytest.mark.long
def test_they_are_with_the_released_sizes():
    encoder = host_encoder(num_filters=64, hidden_size=512)
    assert_same(encoder, 144_001, num_threads=2)
    for num_samples in (24_001, 95_999, 96_001, 143_999, 250_007):
        assert_same(encoder, num_samples, num_threads=1)


def assert_same(hosts, num_samples, num_threads):
    generator = torch.Generator().manual_seed(num_samples)
    samples = 0.1 * torch.randn(1, 1, num_samples, generator=generator)
    with on_threads(num_threads), torch.inference_mode():
        assert torch.equal(SlicedEncoder(hosts, RATE_HZ)(samples), hosts(samples))


@pytest.mark.parametrize("num_filters", [64, 4])
def test_no_convolution_of_a_slice_is_so_short_that_another_kernel_computes_it(
    num_filters,
):
    with torch.device("meta"):
        encoder = SlicedEncoder(host_encoder(num_filters, 64), RATE_HZ)
        clip = torch.zeros(1, 1, 3 * encoder.num_samples)
    seen = []
    for module in encoder.sliced.modules():
        if isinstance(module, nn.Conv1d):
            module.register_forward_pre_hook(
                lambda _, args: seen.append(args[0].numel())
            )
    with torch.inference_mode():
        encoder(clip)
    assert len(seen) == 3 * (1 + 2 * 3)
    assert min(seen) >= FEWEST_NUMBERS


def test_a_slice_is_two_seconds_of_whole_strides():
    assert SlicedEncoder(host_encoder(4, 64), RATE_HZ).num_samples == 2 * RATE_HZ


def test_the_encoder_that_is_loaded_is_sliced(qwen3_checkpoint):
    encoders = load_reference_encoders(qwen3_checkpoint, torch.device("cpu"))
    network = encoders["codec"].network  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(network.encoder, SlicedEncoder)


@pytest.mark.parametrize(
    "options", [{"use_causal_conv": False}, {"pad_mode": "reflect"}]
)
def test_one_that_looks_ahead_or_pads_otherwise_is_left_whole(options):
    assert can_be_sliced(host_encoder(4, 64))
    assert not can_be_sliced(host_encoder(4, 64, **options))
