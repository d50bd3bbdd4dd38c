"""Weights of the AudioVAE, in float32 and under the names of ``audiovae.pth``."""

import math

import torch

from vllm_tts_cache.families.voxcpm2.tiny import configs
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

# Speech has a standard deviation of about 0.1; the layers behind work at about 1,
# where a stage loses as much as its residual units add.
_INPUT_GAIN = 10.0
_RESIDUAL_GAIN = 0.5
_DOWN_GAIN = 0.85
_UP_GAIN = 0.5
# The output goes through a tanh; at this gain it hardly bends.
_OUTPUT_GAIN = 0.1


def add_audio_vae(weights: WeightBuilder, encoder_dim: int) -> None:
    """Add the whole of it."""
    _add_encoder(weights.under("encoder"), encoder_dim)
    _add_decoder(weights.under("decoder"), configs.DECODER_DIM)
    weights.tensors["decoder.sr_bin_boundaries"] = torch.tensor(
        configs.RATE_BOUNDARIES_HZ, dtype=torch.int32
    )


def _add_encoder(encoder: WeightBuilder, width: int) -> None:
    """From samples to latents: each stage downsamples and doubles the width."""
    _add_conv(encoder, "block.0", (width, 1, 7), _INPUT_GAIN)
    for index, rate in enumerate(configs.ENCODER_RATES, start=1):
        stage = encoder.under(f"block.{index}.block")
        _add_residual_units(stage, 0, width)
        _add_snake(stage, "3", width)
        _add_conv(stage, "4", (2 * width, width, 2 * rate), _DOWN_GAIN)
        width *= 2
    for half in ("fc_mu", "fc_logvar"):
        _add_conv(encoder, half, (configs.LATENT_DIM, width, 3))


def _add_decoder(decoder: WeightBuilder, width: int) -> None:
    """From latents to samples: each stage upsamples and halves the width."""
    num_rates = len(configs.RATE_BOUNDARIES_HZ) + 1
    _add_conv(decoder, "model.0", (configs.LATENT_DIM, 1, 7))
    _add_conv(decoder, "model.1", (width, configs.LATENT_DIM, 1))
    for index, rate in enumerate(configs.DECODER_RATES, start=2):
        condition = decoder.under(f"sr_cond_model.{index}")
        condition.fill("scale_embed.weight", (num_rates, width), 1.0)
        condition.fill("bias_embed.weight", (num_rates, width), 0.0)
        stage = decoder.under(f"model.{index}.block")
        _add_snake(stage, "0", width)
        _add_transposed_conv(stage, "1", (width, width // 2), rate)
        width //= 2
        _add_residual_units(stage, 2, width)
    last = len(configs.DECODER_RATES) + 2
    _add_snake(decoder, f"model.{last}", width)
    _add_conv(decoder, f"model.{last + 1}", (1, width, 7), _OUTPUT_GAIN)


def _add_residual_units(stage: WeightBuilder, first: int, width: int) -> None:
    """Three units, at ``first`` and after it; their dilations have no weights."""
    for index in range(first, first + 3):
        unit = stage.under(f"{index}.block")
        _add_snake(unit, "0", width)
        _add_conv(unit, "1", (width, 1, 7))  # depthwise
        _add_snake(unit, "2", width)
        _add_conv(unit, "3", (width, width, 1), _RESIDUAL_GAIN)


def _add_conv(
    weights: WeightBuilder, name: str, shape: tuple[int, int, int], gain: float = 1.0
) -> None:
    """A weight-normed convolution ``(out, in, kernel)``.

    Inputs of unit variance come out with a standard deviation of ``gain``; what all
    of them have in common does not come out, since the activations before it only
    ever add.
    """
    conv = weights.under(name)
    direction = conv.normal("weight_v", shape, 1.0)
    if shape[1] > 1:
        direction -= direction.mean(dim=(1, 2), keepdim=True)
    conv.fill("weight_g", (shape[0], 1, 1), gain)
    conv.fill("bias", shape[:1], 0.0)


def _add_transposed_conv(
    weights: WeightBuilder, name: str, widths: tuple[int, int], stride: int
) -> None:
    """A weight-normed transposed convolution of two strides' width."""
    conv = weights.under(name)
    direction = conv.normal("weight_v", (*widths, 2 * stride), 1.0)
    direction -= direction.mean(dim=0, keepdim=True)
    # The norm is over outputs and kernel here; 2 taps of each input meet.
    gain = _UP_GAIN * math.sqrt(widths[1] * stride / widths[0])
    conv.fill("weight_g", (widths[0], 1, 1), gain)
    conv.fill("bias", widths[1:], 0.0)


def _add_snake(weights: WeightBuilder, name: str, width: int) -> None:
    """The periodic activation's frequencies."""
    weights.fill(f"{name}.alpha", (1, width, 1), 1.0)
