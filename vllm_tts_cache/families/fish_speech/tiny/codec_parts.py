"""Weights of what the codec's encoder, quantizer and decoder are made of."""

import math

from vllm_tts_cache.families.fish_speech.tiny import sizes
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

# As at the start of a training, 0.01, a layer would add next to nothing.
LAYER_SCALE = 0.3
_RESIDUAL_GAIN = 0.5


def add_conv(
    weights: WeightBuilder, name: str, shape: tuple[int, int, int], gain: float = 1.0
) -> None:
    """A weight-normed convolution ``(out, in, kernel)``.

    Inputs of unit variance come out with a standard deviation of ``gain``; what all
    of them have in common does not come out, since the activations before it only
    ever add.
    """
    conv = weights.under(f"{name}.conv")
    normed = conv.under("parametrizations.weight")
    direction = normed.normal("original1", shape, 1.0)
    if shape[1] > 1:
        direction -= direction.mean(dim=(1, 2), keepdim=True)
    normed.fill("original0", (shape[0], 1, 1), gain)
    conv.fill("bias", shape[:1], 0.0)


def add_transposed_conv(
    weights: WeightBuilder, name: str, widths: tuple[int, int], stride: int
) -> None:
    """A weight-normed transposed convolution of two strides' width; keeps variance."""
    conv = weights.under(f"{name}.conv")
    normed = conv.under("parametrizations.weight")
    direction = normed.normal("original1", (*widths, 2 * stride), 1.0)
    direction -= direction.mean(dim=0, keepdim=True)
    # The norm is over outputs and kernel here; 2 taps of each input meet.
    gain = math.sqrt(widths[1] * stride / widths[0])
    normed.fill("original0", (widths[0], 1, 1), gain)
    conv.fill("bias", widths[1:], 0.0)


def add_residual_units(block: WeightBuilder, first: int, width: int) -> None:
    """Three units, at ``first`` and after it; their dilations have no weights."""
    for index in range(first, first + 3):
        unit = block.under(f"{index}.block")
        add_snake(unit, "0", width)
        add_conv(unit, "1", (width, width, 7))
        add_snake(unit, "2", width)
        add_conv(unit, "3", (width, width, 1), _RESIDUAL_GAIN)


def add_snake(weights: WeightBuilder, name: str, width: int) -> None:
    """The periodic activation's frequencies."""
    weights.fill(f"{name}.alpha", (1, width, 1), 1.0)


def add_transformer(model: WeightBuilder, width: int, num_layers: int) -> None:
    """Layers and the last norm."""
    heads = width // sizes.HEAD_DIM_IN_CODEC * sizes.HEAD_DIM_IN_CODEC
    shapes = {
        "attention.wqkv": (3 * heads, width),
        "attention.wo": (width, heads),
        "feed_forward.w1": (3 * width, width),
        "feed_forward.w2": (width, 3 * width),
        "feed_forward.w3": (3 * width, width),
    }
    for index in range(num_layers):
        layer = model.under(f"layers.{index}")
        for name, shape in shapes.items():
            layer.projection(f"{name}.weight", shape)
        for norm in ("attention_norm", "ffn_norm"):
            layer.fill(f"{norm}.weight", (width,), 1.0)
        for scale in ("attention_layer_scale", "ffn_layer_scale"):
            layer.fill(f"{scale}.gamma", (width,), LAYER_SCALE)
    model.fill("norm.weight", (width,), 1.0)
