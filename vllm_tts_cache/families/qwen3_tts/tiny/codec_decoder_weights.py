"""Weights of the 12 Hz codec's decoder, in float32."""

import math

from vllm_tts_cache.families.qwen3_tts.tiny import sizes
from vllm_tts_cache.families.qwen3_tts.tiny.sizes import CodecDecoderSizes
from vllm_tts_cache.testing.tiny_parts import (
    WeightBuilder,
    add_convnext,
    add_layers,
    projected,
)

_LAYER_SCALE = 0.01
# The decoder clips its output to [-1, 1]; at this gain hardly a sample is clipped.
_OUTPUT_GAIN = 0.05


def add_codec_decoder(weights: WeightBuilder, size: CodecDecoderSizes) -> None:
    """Add everything below ``decoder.``."""
    decoder = weights.under("decoder")
    _add_quantizer(decoder.under("quantizer.rvq_first"), size, 1)
    _add_quantizer(decoder.under("quantizer.rvq_rest"), size, sizes.NUM_CODEBOOKS - 1)
    _add_conv(decoder, "pre_conv", (size.latent_dim, size.codebook_dim, 3))
    _add_transformer(decoder.under("pre_transformer"), size)
    for index, factor in enumerate(size.upsampling_ratios):
        stage = decoder.under(f"upsample.{index}")
        _add_transposed(stage, "0", (size.latent_dim, size.latent_dim), factor, factor)
        add_convnext(stage.under("1"), size.latent_dim, _LAYER_SCALE)
    _add_synthesis(decoder.under("decoder"), size)


def _add_quantizer(
    quantizer: WeightBuilder, size: CodecDecoderSizes, num_books: int
) -> None:
    dim = size.codebook_dim // 2
    quantizer.projection("input_proj.weight", (dim, size.codebook_dim, 1))
    quantizer.projection(
        "output_proj.weight", (size.codebook_dim, dim, 1), 1 / math.sqrt(num_books)
    )
    for book in range(num_books):
        codebook = quantizer.under(f"vq.layers.{book}._codebook")
        codebook.fill("cluster_usage", (sizes.CODEBOOK_SIZE,), 1.0)
        codebook.normal("embedding_sum", (sizes.CODEBOOK_SIZE, dim), 1.0)


def _add_transformer(model: WeightBuilder, size: CodecDecoderSizes) -> None:
    inner = size.transformer
    model.linear("input_proj", size.latent_dim, inner.hidden)
    model.linear("output_proj", inner.hidden, size.latent_dim)
    add_layers(model, inner, projected())
    for index in range(inner.num_layers):
        for part in ("self_attn_layer_scale", "mlp_layer_scale"):
            name = f"layers.{index}.{part}.scale"
            model.fill(name, (inner.hidden,), _LAYER_SCALE)


def _add_synthesis(decoder: WeightBuilder, size: CodecDecoderSizes) -> None:
    """From latents to samples: each stage upsamples and halves the width."""
    width = size.decoder_dim
    _add_conv(decoder, "0", (width, size.latent_dim, 7))
    for index, rate in enumerate(size.upsample_rates, start=1):
        stage = decoder.under(f"{index}.block")
        _add_snake(stage, "0", width)
        _add_transposed(stage, "1", (width, width // 2), 2 * rate, rate)
        width //= 2
        for unit in (2, 3, 4):
            _add_residual_unit(stage.under(str(unit)), width)
    last = len(size.upsample_rates) + 1
    _add_snake(decoder, str(last), width)
    # Centred, because the activations before it are never negative: no offset.
    decoder.centred(f"{last + 1}.conv.weight", (1, width, 7), _OUTPUT_GAIN)
    decoder.fill(f"{last + 1}.conv.bias", (1,), 0.0)


def _add_residual_unit(unit: WeightBuilder, width: int) -> None:
    _add_snake(unit, "act1", width)
    _add_conv(unit, "conv1", (width, width, 7), 0.5)
    _add_snake(unit, "act2", width)
    _add_conv(unit, "conv2", (width, width, 1), 0.5)


def _add_snake(weights: WeightBuilder, name: str, width: int) -> None:
    for parameter in ("alpha", "beta"):
        weights.fill(f"{name}.{parameter}", (width,), 0.0)


def _add_conv(
    weights: WeightBuilder, name: str, shape: tuple[int, int, int], gain: float = 1.0
) -> None:
    weights.projection(f"{name}.conv.weight", shape, gain)
    weights.fill(f"{name}.conv.bias", shape[:1], 0.0)


def _add_transposed(
    weights: WeightBuilder, name: str, widths: tuple[int, int], kernel: int, stride: int
) -> None:
    """A transposed convolution; ``kernel / stride`` inputs meet in an output."""
    std = 1 / math.sqrt(widths[0] * kernel / stride)
    weights.normal(f"{name}.conv.weight", (*widths, kernel), std)
    weights.fill(f"{name}.conv.bias", widths[1:], 0.0)
