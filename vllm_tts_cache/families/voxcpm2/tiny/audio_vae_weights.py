"""Weights of the AudioVAE, in float32 and under the names of ``audiovae.pth``."""

import torch

from vllm_tts_cache.families.networks.dac.tiny import DacParts
from vllm_tts_cache.families.voxcpm2.tiny import configs
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

# The output goes through a tanh; at this gain it hardly bends.
_OUTPUT_GAIN = 0.1
_PARTS = DacParts(
    conv="",
    direction="weight_v",
    norm="weight_g",
    is_depthwise=True,
    down_gain=0.85,  # a stage loses as much as its residual units add
    up_gain=0.5,
)


def add_audio_vae(weights: WeightBuilder, encoder_dim: int) -> None:
    """Add the whole of it."""
    encoder = weights.under("encoder")
    width = _PARTS.add_down(encoder.under("block"), encoder_dim, configs.ENCODER_RATES)
    for half in ("fc_mu", "fc_logvar"):
        _PARTS.add_conv(encoder, half, (configs.LATENT_DIM, width, 3))
    _add_decoder(weights.under("decoder"), configs.DECODER_DIM)
    weights.tensors["decoder.sr_bin_boundaries"] = torch.tensor(
        configs.RATE_BOUNDARIES_HZ, dtype=torch.int32
    )


def _add_decoder(decoder: WeightBuilder, width: int) -> None:
    model, rates = decoder.under("model"), configs.DECODER_RATES
    _PARTS.add_conv(model, "0", (configs.LATENT_DIM, 1, 7))
    _PARTS.add_conv(model, "1", (width, configs.LATENT_DIM, 1))
    _PARTS.add_up(model, width, rates, first=2, output_gain=_OUTPUT_GAIN)
    for index in range(len(rates)):
        condition = decoder.under(f"sr_cond_model.{index + 2}")
        shape = len(configs.RATE_BOUNDARIES_HZ) + 1, width // 2**index
        condition.fill("scale_embed.weight", shape, 1.0)
        condition.fill("bias_embed.weight", shape, 0.0)
