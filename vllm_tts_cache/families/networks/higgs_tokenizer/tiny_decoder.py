"""Random weights of the tokenizer's two decoders, of which one makes audio."""

import math
from collections.abc import Mapping
from typing import Any

from vllm_tts_cache.families.networks.higgs_tokenizer.tiny_encoder import (
    add_conv,
    add_residual_units,
    add_semantic_units,
    add_snake,
)
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

# The output is taken as samples as it is.
_OUTPUT_GAIN = 0.1


def add_acoustic_decoder(decoder: WeightBuilder, dac: Mapping[str, Any]) -> None:
    """The DAC's: each stage upsamples and halves the width."""
    width = dac["decoder_hidden_size"]
    add_conv(decoder, "conv1", (width, dac["hidden_size"], 7))
    for index, rate in enumerate(dac["upsampling_ratios"]):
        block = decoder.under(f"block.{index}")
        add_snake(block, "snake1", width)
        _add_transposed_conv(block, "conv_t1", width, rate)
        width //= 2
        add_residual_units(block, width)
    add_snake(decoder, "snake1", width)
    add_conv(decoder, "conv2", (1, width, 7), _OUTPUT_GAIN)


def add_semantic_decoder(decoder: WeightBuilder, width: int) -> None:
    """That of the semantic half; nobody runs it."""
    for name in ("conv1", "conv2"):
        decoder.projection(f"{name}.weight", (width, width, 3))
    for index in range(2):
        block = decoder.under(f"conv_blocks.{index}")
        block.projection("conv.weight", (width, width, 3))
        block.fill("conv.bias", (width,), 0.0)
        add_semantic_units(block, width)


def _add_transposed_conv(
    weights: WeightBuilder, name: str, width: int, stride: int
) -> None:
    """A transposed convolution ``(in, out, kernel)`` of two strides' width."""
    conv = weights.under(name)
    shape = (width, width // 2, 2 * stride)
    # Two taps of each input meet in an output.
    weight = conv.normal("weight", shape, 1 / math.sqrt(2 * width))
    weight -= weight.mean(dim=0, keepdim=True)
    conv.fill("bias", (width // 2,), 0.0)
