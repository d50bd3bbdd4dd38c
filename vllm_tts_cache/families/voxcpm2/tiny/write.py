"""Write a tiny VoxCPM2 checkpoint with random weights. Not a model."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import silu

from vllm_tts_cache.families.networks.dac.tiny import DacParts
from vllm_tts_cache.families.voxcpm2.tiny import configs
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_checkpoint import EncoderOptions, Report
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

_EMBEDDING_STD = 1.0
_ATTENTION_GAIN = 2.0  # of queries and keys each
# With less, the result would depend on the noise and hardly on its conditions.
_DIFFUSION_LAYER_GAIN = 2.0
_VELOCITY_GAIN = 3.0
# The stop's logit less that of going on has a standard deviation of about 0.4 in one
# speech; with this much less it is above zero after one patch in nine.
_STOP_MARGIN = 0.5


def write(directory: Path, options: EncoderOptions, report: Report) -> None:
    """Fill an empty directory; called as the family's ``tiny_part``.

    With ``real`` encoders the AudioVAE's encoder has its released size, 48.4 million
    weights.
    """
    report("text tokenizer")
    configs.save_text_tokenizer(directory)
    report("language models")
    vocab_size = len(configs.text_vocab())
    config = configs.model_config(vocab_size, options.encoders)
    parts.save_json(directory / "config.json", config)
    model = WeightBuilder(options.seed)
    add_model(model, vocab_size)
    parts.save_weights(directory / "model.safetensors", model.tensors, torch.bfloat16)
    report("audio VAE")
    audio_vae = WeightBuilder(options.seed)
    add_audio_vae(audio_vae, configs.ENCODER_DIM[options.encoders])
    # Through a file of ours: a full disk is an OSError there, not a RuntimeError.
    with (directory / "audiovae.pth").open("wb") as file:
        torch.save({"state_dict": audio_vae.tensors}, file)


def add_model(weights: WeightBuilder, vocab_size: int) -> None:
    """Add everything but the AudioVAE."""
    lm = weights.under("base_lm")
    lm.normal("embed_tokens.weight", (vocab_size, configs.LM.hidden), _EMBEDDING_STD)
    parts.add_layers(lm, configs.LM, _projected())
    parts.add_layers(weights.under("residual_lm"), configs.RESIDUAL_LM, _projected())
    _add_feature_encoder(weights.under("feat_encoder"))
    _add_diffusion(weights.under("feat_decoder.estimator"))
    _add_bridges(weights)
    _add_stop(weights)


def _add_feature_encoder(encoder: WeightBuilder) -> None:
    hidden = configs.FEATURE_ENCODER.hidden
    encoder.normal("special_token", (1, 1, 1, hidden), 1.0)
    encoder.linear("in_proj", configs.LATENT_DIM, hidden)
    parts.add_layers(encoder.under("encoder"), configs.FEATURE_ENCODER, _projected())


def _add_diffusion(estimator: WeightBuilder) -> None:
    hidden = configs.DIT.hidden
    estimator.linear("in_proj", configs.LATENT_DIM, hidden)
    estimator.linear("cond_proj", configs.LATENT_DIM, hidden)
    estimator.linear("out_proj", hidden, configs.LATENT_DIM, _VELOCITY_GAIN)
    for time in ("time_mlp", "delta_time_mlp"):
        for layer in ("linear_1", "linear_2"):
            estimator.under(time).linear(layer, hidden, hidden)
    layers = _projected(_DIFFUSION_LAYER_GAIN)
    parts.add_layers(estimator.under("decoder"), configs.DIT, layers)


def _add_bridges(weights: WeightBuilder) -> None:
    """Add the projections from one model to another."""
    lm, dit = configs.LM.hidden, configs.DIT.hidden
    weights.linear("enc_to_lm_proj", configs.FEATURE_ENCODER.hidden, lm)
    weights.linear("lm_to_dit_proj", lm, dit)
    weights.linear("res_to_dit_proj", lm, dit)
    weights.linear("fusion_concat_proj", 2 * lm, lm)
    weights.linear("fsq_layer.in_proj", lm, configs.QUANTIZER_DIM)
    weights.linear("fsq_layer.out_proj", configs.QUANTIZER_DIM, lm)


def _add_stop(weights: WeightBuilder) -> None:
    """Add the stop's layers, in which one channel is always 1 and votes to go on."""
    hidden = configs.LM.hidden
    weight, bias = weights.linear("stop_proj", hidden, hidden)
    weight[0], bias[0] = 0.0, 1.0
    head = weights.projection("stop_head.weight", (2, hidden))
    head[:, 0] = torch.tensor([_STOP_MARGIN / silu(bias[0]).item(), 0.0])


def _projected(gain: float = 1.0) -> parts.Draw:
    def add(layer: WeightBuilder, name: str, shape: Sequence[int]) -> None:
        is_compared = re.search("(q|k)_proj", name)
        layer.projection(name, shape, _ATTENTION_GAIN if is_compared else gain)

    return add


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
    """Add encoder and decoder, in float32 and under the names of ``audiovae.pth``."""
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
