"""Weights of the speaker encoder (ECAPA-TDNN) and of the 12 Hz codec, in float32."""

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_tts_cache.families.qwen3_tts.tiny import sizes
from vllm_tts_cache.families.qwen3_tts.tiny.configs import Json
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

# Speech has a standard deviation of about 0.1; the layers behind work at about 1.
_INPUT_GAIN = 25.0
# Latents that spread a few times as wide as the codebooks fall on many entries.
_LATENT_GAIN = 3.0
# How much a layer of the decoder's transformer adds, as at the start of a training.
_LAYER_SCALE = 0.01
# The encoder's layers add more: 0.01 would hide any difference in attention.
_ENCODER_LAYER_SCALE = 0.3
# Bounds of the logarithm of a codebook entry's usage, which every reader divides by.
_CLUSTER_USAGE = (-2.0, 6.0)
# Carries a signal through the speaker encoder's rectifiers undamped.
_SPEAKER_GAIN = 2**0.5
_SPEAKER_EMBEDDING_GAIN = 0.5  # of its last layer, on pooled features
# The decoder clips its output to [-1, 1]; at this gain hardly a sample is clipped.
_OUTPUT_GAIN = 0.05


def add_speaker_encoder(weights: WeightBuilder, config: Json) -> None:
    """Add everything below ``speaker_encoder.``; Qwen2.5-Omni has the same network."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
        Qwen2_5OmniDiTConfig,
    )
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        ECAPA_TimeDelayNet,
    )

    with torch.device("meta"):
        network = ECAPA_TimeDelayNet(Qwen2_5OmniDiTConfig(**config))
    shapes = {name: tuple(t.shape) for name, t in network.state_dict().items()}
    parts.add_all(weights.under("speaker_encoder"), shapes, _SPEAKER_RULES)


def add_codec_encoder(weights: WeightBuilder, config: Json) -> None:
    """Add everything below ``encoder.``: what Mimi has, without its decoder."""
    from transformers import MimiConfig, MimiModel

    with torch.device("meta"):
        network = MimiModel(MimiConfig(**config))
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in network.state_dict().items()
        if not re.match("decoder|upsample", name)
    }
    parts.add_all(weights.under("encoder"), shapes, _ENCODER_RULES)


def _add_usage(codebook: WeightBuilder, name: str, shape: Sequence[int]) -> Tensor:
    return codebook.log_uniform(name, shape, *_CLUSTER_USAGE)


def _add_sums(codebook: WeightBuilder, name: str, shape: Sequence[int]) -> None:
    """Add a codebook's entries, each times its usage, which is drawn once more."""
    total = codebook.normal(name, shape, 1.0)
    usage_name = name.replace("embed_sum", "cluster_usage")
    total *= _add_usage(codebook, usage_name, shape[:1])[:, None]


_SPEAKER_RULES: dict[str, parts.Draw] = {
    "bias$": parts.constant(0.0),
    r"^fc\.": parts.centred(_SPEAKER_EMBEDDING_GAIN),
    "": parts.centred(_SPEAKER_GAIN),
}
_ENCODER_RULES: dict[str, parts.Draw] = {
    "bias$": parts.constant(0.0),
    r"(layernorm\.weight|initialized)$": parts.constant(1.0),
    "layer_scale": parts.constant(_ENCODER_LAYER_SCALE),
    "cluster_usage$": _add_usage,
    "embed_sum$": _add_sums,
    r"input_proj\.": parts.projected(_LATENT_GAIN),
    r"layers\.0\.conv\.": parts.projected(_INPUT_GAIN),
    r"conv\.": parts.centred(),
    "": parts.projected(),
}


def add_codec_decoder(weights: WeightBuilder, size: sizes.CodecDecoderSizes) -> None:
    """Add everything below ``decoder.``."""
    decoder = weights.under("decoder")
    _add_quantizer(decoder.under("quantizer.rvq_first"), size, 1)
    _add_quantizer(decoder.under("quantizer.rvq_rest"), size, sizes.NUM_CODEBOOKS - 1)
    decoder.conv("pre_conv.conv", (size.latent_dim, size.codebook_dim, 3))
    _add_transformer(decoder.under("pre_transformer"), size)
    for index, factor in enumerate(size.upsampling_ratios):
        stage = decoder.under(f"upsample.{index}")
        _add_transposed(stage, "0", (size.latent_dim, size.latent_dim), factor, factor)
        parts.add_convnext(stage.under("1"), size.latent_dim, _LAYER_SCALE)
    _add_synthesis(decoder.under("decoder"), size)


def _add_quantizer(
    quantizer: WeightBuilder, size: sizes.CodecDecoderSizes, num_books: int
) -> None:
    dim = size.codebook_dim // 2
    quantizer.projection("input_proj.weight", (dim, size.codebook_dim, 1))
    gain = 1 / math.sqrt(num_books)
    quantizer.projection("output_proj.weight", (size.codebook_dim, dim, 1), gain)
    for book in range(num_books):
        codebook = quantizer.under(f"vq.layers.{book}._codebook")
        codebook.fill("cluster_usage", (sizes.CODEBOOK_SIZE,), 1.0)
        codebook.normal("embedding_sum", (sizes.CODEBOOK_SIZE, dim), 1.0)


def _add_transformer(model: WeightBuilder, size: sizes.CodecDecoderSizes) -> None:
    inner = size.transformer
    model.linear("input_proj", size.latent_dim, inner.hidden)
    model.linear("output_proj", inner.hidden, size.latent_dim)
    parts.add_layers(model, inner, parts.projected())
    for index in range(inner.num_layers):
        for part in ("self_attn_layer_scale", "mlp_layer_scale"):
            name = f"layers.{index}.{part}.scale"
            model.fill(name, (inner.hidden,), _LAYER_SCALE)


def _add_synthesis(decoder: WeightBuilder, size: sizes.CodecDecoderSizes) -> None:
    """Add stages from latents to samples; each upsamples and halves the width."""
    width = size.decoder_dim
    decoder.conv("0.conv", (width, size.latent_dim, 7))
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
    unit.conv("conv1.conv", (width, width, 7), 0.5)
    _add_snake(unit, "act2", width)
    unit.conv("conv2.conv", (width, width, 1), 0.5)


def _add_snake(weights: WeightBuilder, name: str, width: int) -> None:
    for parameter in ("alpha", "beta"):
        weights.fill(f"{name}.{parameter}", (width,), 0.0)


def _add_transposed(
    weights: WeightBuilder, name: str, widths: tuple[int, int], kernel: int, stride: int
) -> None:
    """Add a transposed convolution; ``kernel / stride`` inputs meet in an output."""
    std = 1 / math.sqrt(widths[0] * kernel / stride)
    weights.normal(f"{name}.conv.weight", (*widths, kernel), std)
    weights.fill(f"{name}.conv.bias", widths[1:], 0.0)
