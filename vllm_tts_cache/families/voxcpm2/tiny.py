"""Write a tiny VoxCPM2 checkpoint with random weights. Not a model.

The tokenizer is in Llama's layout, with a few hundred tokens that spell any text.
Letters are tokens, other characters are their bytes. Two Chinese words are tokens as
well, since model and host split such words again.
"""

import string
from pathlib import Path

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)
from torch.nn.functional import silu

from vllm_tts_cache.families.networks.dac.tiny import DacParts
from vllm_tts_cache.families.networks.torch_file import write_torch_file
from vllm_tts_cache.testing import tiny_checkpoint as tiny
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_checkpoint import TransformerSizes
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

Json = dict[str, object]

# As released: they decide how many positions a reference takes, and what is stored.
LATENT_DIM = 64
ENCODER_RATES = (2, 5, 8, 8)
DECODER_RATES = (8, 6, 5, 2, 2, 2)
# Upper bounds of the ranges of sample rates that the decoder distinguishes.
RATE_BOUNDARIES_HZ = (20_000, 30_000, 40_000)

_HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
LM = TransformerSizes(hidden=128, intermediate=256, num_layers=2, **_HEADS)
_FACTORS = [1.0] * (LM.head_dim // 2)  # of its rotary embedding
RESIDUAL_LM = TransformerSizes(hidden=128, intermediate=256, num_layers=1, **_HEADS)
FEATURE_ENCODER = TransformerSizes(hidden=64, intermediate=128, num_layers=1, **_HEADS)
DIT = TransformerSizes(hidden=64, intermediate=128, num_layers=1, **_HEADS)

QUANTIZER_DIM = 32
MAX_POSITIONS = 4_096

# Width of the first convolution; every stage doubles it.
ENCODER_DIM: dict[tiny.EncoderSize, int] = {"tiny": 8, "real": 128}
# Every stage halves it; there are six.
DECODER_DIM = 128

_EMBEDDING_STD = 1.0
_COMPARED = {"[qk]_proj": parts.projected(2.0)}  # queries and keys
# With less, the result would depend on the noise and hardly on its conditions.
_DIFFUSION_LAYER_GAIN = 2.0
_VELOCITY_GAIN = 3.0
# The stop's logit less that of going on has a standard deviation of about 0.4 in one
# speech; with this much less it is above zero after one patch in nine.
_STOP_MARGIN = 0.5


def write(directory: Path, options: tiny.EncoderOptions, report: tiny.Report) -> None:
    """Fill an empty directory; called as the family's ``tiny_part``.

    With ``real`` encoders the AudioVAE's encoder has its released size, 48.4 million
    weights.
    """
    report("text tokenizer")
    save_text_tokenizer(directory)
    report("language models")
    vocab_size = len(text_vocab())
    config = model_config(vocab_size, options.encoders)
    parts.save_json(directory / "config.json", config)
    model = WeightBuilder(options.seed)
    add_model(model, vocab_size)
    parts.save_weights(directory / "model.safetensors", model.tensors, torch.bfloat16)
    report("audio VAE")
    audio_vae = WeightBuilder(options.seed)
    add_audio_vae(audio_vae, ENCODER_DIM[options.encoders])
    write_torch_file(directory / "audiovae.pth", {"state_dict": audio_vae.tensors})


def model_config(vocab_size: int, encoders: tiny.EncoderSize) -> Json:
    """Return ``config.json``, which has no fields for Transformers or vLLM."""
    return {
        "architecture": "voxcpm2",
        "lm_config": {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "vocab_size": vocab_size,
            **LM.config,
            "kv_channels": LM.head_dim,
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": _FACTORS,
                "short_factor": _FACTORS,
                "original_max_position_embeddings": MAX_POSITIONS,
            },
            "use_mup": False,
            "scale_emb": 12,
            "dim_model_base": 256,
            "scale_depth": 1.4,
        },
        "patch_size": 4,
        "feat_dim": LATENT_DIM,
        "residual_lm_num_layers": RESIDUAL_LM.num_layers,
        "residual_lm_no_rope": True,
        "scalar_quantization_latent_dim": QUANTIZER_DIM,
        "scalar_quantization_scale": 9,
        "encoder_config": _side_model(FEATURE_ENCODER),
        "dit_config": {
            **_side_model(DIT),
            "dit_mean_mode": False,
            "cfm_config": {
                "sigma_min": 1e-6,
                "solver": "euler",
                "t_scheduler": "log-norm",
                "inference_cfg_rate": 2.0,
            },
        },
        "audio_vae_config": {
            "encoder_dim": ENCODER_DIM[encoders],
            "encoder_rates": list(ENCODER_RATES),
            "latent_dim": LATENT_DIM,
            "decoder_dim": DECODER_DIM,
            "decoder_rates": list(DECODER_RATES),
            "depthwise": True,
            "sample_rate": 16_000,
            "out_sample_rate": 48_000,
            "use_noise_block": False,
            "sr_bin_boundaries": list(RATE_BOUNDARIES_HZ),
            "cond_type": "scale_bias",
            "cond_dim": 128,
            "cond_out_layer": False,
        },
        "max_length": MAX_POSITIONS,
        "device": "cuda",  # the package takes the CPU where there is no GPU
        "dtype": "bfloat16",
    }


def _side_model(size: TransformerSizes) -> Json:
    return {
        "hidden_dim": size.hidden,
        "ffn_dim": size.intermediate,
        "num_heads": size.num_heads,
        "num_layers": size.num_layers,
        "kv_channels": size.head_dim,
    }


UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
# As released.
CONTROL_IDS: dict[str, int] = {
    UNKNOWN: 0,
    BEGIN: 1,
    END: 2,
    "<|audio_start|>": 101,
    "<|audio_end|>": 102,
    "<|audio_prompt_start|>": 103,
    "<|audio_prompt_end|>": 104,
}
_SPACE = "▁"
_WORDS = ("你好", "世界")
_FIRST_ID = max(CONTROL_IDS.values()) + 1


def text_vocab() -> dict[str, int]:
    """Every token and its id; ids have no gaps."""
    symbols = [f"<0x{byte:02X}>" for byte in range(256)]
    symbols += [_SPACE, *string.ascii_letters, *string.digits, *string.punctuation]
    symbols += [*"".join(_WORDS), *_WORDS]
    ids = CONTROL_IDS | {s: _FIRST_ID + place for place, s in enumerate(symbols)}
    unused = sorted(set(range(_FIRST_ID)) - set(CONTROL_IDS.values()))
    return ids | {f"<|unused:{token_id}|>": token_id for token_id in unused}


def save_text_tokenizer(out: Path) -> None:
    """Write ``tokenizer.json`` and the two files that say which tokens are special."""
    merges = [(word[0], word[1]) for word in _WORDS]
    unknown = {"unk_token": UNKNOWN, "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(models.BPE(vocab=text_vocab(), merges=merges, **unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    to_bytes = [decoders.Replace(_SPACE, " "), decoders.ByteFallback()]
    to_text = [decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([*to_bytes, *to_text])
    marks = [AddedToken(t, special=True, normalized=False) for t in CONTROL_IDS]
    tokenizer.add_special_tokens(marks)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A $B:1",
        special_tokens=[(BEGIN, CONTROL_IDS[BEGIN])],
    )
    tokenizer.save(str(out / "tokenizer.json"))
    special = {"unk_token": UNKNOWN, "bos_token": BEGIN, "eos_token": END}
    parts.save_json(out / "special_tokens_map.json", special)
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "legacy": True,
        "model_max_length": 32_768,
        **special,
    }
    parts.save_json(out / "tokenizer_config.json", config)


def add_model(weights: WeightBuilder, vocab_size: int) -> None:
    """Add everything but the AudioVAE."""
    lm = weights.under("base_lm")
    lm.normal("embed_tokens.weight", (vocab_size, LM.hidden), _EMBEDDING_STD)
    _add_layers(lm, LM)
    _add_layers(weights.under("residual_lm"), RESIDUAL_LM)
    encoder = weights.under("feat_encoder")
    encoder.normal("special_token", (1, 1, 1, FEATURE_ENCODER.hidden), 1.0)
    encoder.linear("in_proj", LATENT_DIM, FEATURE_ENCODER.hidden)
    _add_layers(encoder.under("encoder"), FEATURE_ENCODER)
    _add_diffusion(weights.under("feat_decoder.estimator"))
    _add_bridges(weights)
    _add_stop(weights)


def _add_diffusion(estimator: WeightBuilder) -> None:
    hidden = DIT.hidden
    estimator.linear("in_proj", LATENT_DIM, hidden)
    estimator.linear("cond_proj", LATENT_DIM, hidden)
    estimator.linear("out_proj", hidden, LATENT_DIM, _VELOCITY_GAIN)
    for time in ("time_mlp", "delta_time_mlp"):
        for layer in ("linear_1", "linear_2"):
            estimator.under(time).linear(layer, hidden, hidden)
    _add_layers(estimator.under("decoder"), DIT, _DIFFUSION_LAYER_GAIN)


def _add_bridges(weights: WeightBuilder) -> None:
    """Add the projections from one model to another."""
    lm, dit = LM.hidden, DIT.hidden
    weights.linear("enc_to_lm_proj", FEATURE_ENCODER.hidden, lm)
    weights.linear("lm_to_dit_proj", lm, dit)
    weights.linear("res_to_dit_proj", lm, dit)
    weights.linear("fusion_concat_proj", 2 * lm, lm)
    weights.linear("fsq_layer.in_proj", lm, QUANTIZER_DIM)
    weights.linear("fsq_layer.out_proj", QUANTIZER_DIM, lm)


def _add_stop(weights: WeightBuilder) -> None:
    """Add the stop's layers, in which one channel is always 1 and votes to go on."""
    hidden = LM.hidden
    weight, bias = weights.linear("stop_proj", hidden, hidden)
    weight[0], bias[0] = 0.0, 1.0
    head = weights.projection("stop_head.weight", (2, hidden))
    head[:, 0] = torch.tensor([_STOP_MARGIN / silu(bias[0]).item(), 0.0])


def _add_layers(to: WeightBuilder, size: TransformerSizes, gain: float = 1.0) -> None:
    parts.add_layers(to, size, "llama", parts.projected(gain), _COMPARED)


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
    width = _PARTS.add_down(encoder.under("block"), encoder_dim, ENCODER_RATES)
    for half in ("fc_mu", "fc_logvar"):
        _PARTS.add_conv(encoder, half, (LATENT_DIM, width, 3))
    _add_decoder(weights.under("decoder"), DECODER_DIM)
    weights.tensors["decoder.sr_bin_boundaries"] = torch.tensor(
        RATE_BOUNDARIES_HZ, dtype=torch.int32
    )


def _add_decoder(decoder: WeightBuilder, width: int) -> None:
    model, rates = decoder.under("model"), DECODER_RATES
    _PARTS.add_conv(model, "0", (LATENT_DIM, 1, 7))
    _PARTS.add_conv(model, "1", (width, LATENT_DIM, 1))
    _PARTS.add_up(model, width, rates, first=2, output_gain=_OUTPUT_GAIN)
    for index in range(len(rates)):
        condition = decoder.under(f"sr_cond_model.{index + 2}")
        shape = len(RATE_BOUNDARIES_HZ) + 1, width // 2**index
        condition.fill("scale_embed.weight", shape, 1.0)
        condition.fill("bias_embed.weight", shape, 0.0)
