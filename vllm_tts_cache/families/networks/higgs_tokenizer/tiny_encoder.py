"""Random weights of the tokenizer's two encoders.

Behind an activation that only adds, random layers would pass on mostly what all their
inputs have in common; so those there are blind to it.
"""

from collections.abc import Mapping
from typing import Any

from vllm_tts_cache.testing.tiny_parts import WeightBuilder

# Speech has a standard deviation of about 0.1; the layers behind work at about 1.
_INPUT_GAIN = 10.0
_RESIDUAL_GAIN = 0.5
# A stage loses about as much as its residual units add.
_DOWN_GAIN = 0.7
_ATTENTION_GAIN = 2.0  # of queries and keys each


def add_acoustic_encoder(encoder: WeightBuilder, dac: Mapping[str, Any]) -> None:
    """The DAC's: each stage downsamples and doubles the width."""
    width = dac["encoder_hidden_size"]
    add_conv(encoder, "conv1", (width, 1, 7), _INPUT_GAIN)
    for index, rate in enumerate(dac["downsampling_ratios"]):
        block = encoder.under(f"block.{index}")
        add_residual_units(block, width)
        add_snake(block, "snake1", width)
        add_conv(block, "conv1", (2 * width, width, 2 * rate), _DOWN_GAIN)
        width *= 2
    add_snake(encoder, "snake1", width)
    add_conv(encoder, "conv2", (dac["hidden_size"], width, 3))


def add_residual_units(block: WeightBuilder, width: int) -> None:
    """Three units; their dilations have no weights."""
    for number in range(1, 4):
        unit = block.under(f"res_unit{number}")
        add_snake(unit, "snake1", width)
        add_conv(unit, "conv1", (width, width, 7))
        add_snake(unit, "snake2", width)
        add_conv(unit, "conv2", (width, width, 1), _RESIDUAL_GAIN)


def add_snake(weights: WeightBuilder, name: str, width: int) -> None:
    """The periodic activation's frequencies."""
    weights.fill(f"{name}.alpha", (1, width, 1), 1.0)


def add_conv(
    weights: WeightBuilder, name: str, shape: tuple[int, int, int], gain: float = 1.0
) -> None:
    """A convolution ``(out, in, kernel)`` with a bias of 0."""
    add = weights.centred if shape[1] > 1 else weights.projection
    add(f"{name}.weight", shape, gain)
    weights.fill(f"{name}.bias", shape[:1], 0.0)


def add_hubert(model: WeightBuilder, hubert: Mapping[str, Any]) -> None:
    """The whole of it, and what only its training needed."""
    hidden, width = hubert["hidden_size"], hubert["conv_dim"][-1]
    model.fill("masked_spec_embed", (hidden,), 0.0)
    layers = model.under("feature_extractor.conv_layers")
    given = 1
    for index, (size, kernel) in enumerate(
        zip(hubert["conv_dim"], hubert["conv_kernel"], strict=True)
    ):
        add = layers.centred if index else layers.projection
        add(f"{index}.conv.weight", (size, given, kernel), 2**0.5)
        given = size
    _add_norm(layers, "0.layer_norm", width)
    _add_norm(model, "feature_projection.layer_norm", width)
    _add_linear(model, "feature_projection.projection", width, hidden)
    _add_transformer(model.under("encoder"), hubert)


def _add_transformer(encoder: WeightBuilder, hubert: Mapping[str, Any]) -> None:
    hidden = hubert["hidden_size"]
    _add_positions(encoder.under("pos_conv_embed.conv"), hubert)
    _add_norm(encoder, "layer_norm", hidden)
    for index in range(hubert["num_hidden_layers"]):
        layer = encoder.under(f"layers.{index}")
        for name in ("q_proj", "k_proj"):
            _add_linear(layer, f"attention.{name}", hidden, hidden, _ATTENTION_GAIN)
        for name in ("v_proj", "out_proj"):
            _add_linear(layer, f"attention.{name}", hidden, hidden)
        inner = layer.under("feed_forward")
        _add_linear(inner, "intermediate_dense", hidden, hubert["intermediate_size"])
        _add_linear(inner, "output_dense", hubert["intermediate_size"], hidden)
        for norm in ("layer_norm", "final_layer_norm"):
            _add_norm(layer, norm, hidden)


def _add_positions(conv: WeightBuilder, hubert: Mapping[str, Any]) -> None:
    """Kept as norm and direction, the norm for each tap of the kernel."""
    hidden, kernel = hubert["hidden_size"], hubert["num_conv_pos_embeddings"]
    groups = hubert["num_conv_pos_embedding_groups"]
    normed = conv.under("parametrizations.weight")
    normed.normal("original1", (hidden, hidden // groups, kernel), 1.0)
    # Of all outputs together, of which each is to have a variance of 1.
    normed.fill("original0", (1, 1, kernel), (hidden / kernel) ** 0.5)
    conv.fill("bias", (hidden,), 0.0)


def add_semantic_encoder(encoder: WeightBuilder, width: int) -> None:
    """What is behind HuBERT."""
    encoder.projection("conv.weight", (width, width, 3))
    for index in range(2):
        block = encoder.under(f"conv_blocks.{index}")
        add_semantic_units(block, width)
        block.projection("conv.weight", (width, width, 3))
        block.fill("conv.bias", (width,), 0.0)


def add_semantic_units(block: WeightBuilder, width: int) -> None:
    """Two units of two convolutions each."""
    for index in range(2):
        unit = block.under(f"res_units.{index}")
        unit.projection("conv1.weight", (width, width, 3))
        unit.projection("conv2.weight", (width, width, 1), _RESIDUAL_GAIN)


def _add_linear(
    weights: WeightBuilder, name: str, inputs: int, outputs: int, gain: float = 1.0
) -> None:
    weights.projection(f"{name}.weight", (outputs, inputs), gain)
    weights.fill(f"{name}.bias", (outputs,), 0.0)


def _add_norm(weights: WeightBuilder, name: str, width: int) -> None:
    weights.fill(f"{name}.weight", (width,), 1.0)
    weights.fill(f"{name}.bias", (width,), 0.0)
