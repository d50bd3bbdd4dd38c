"""A test checkpoint's ``config.json``, its sizes, and its tokenizer; names as released.

The tokenizer is in Llama's layout, with a few hundred tokens that spell any text.
Letters are tokens, other characters are their bytes. Two Chinese words are tokens as
well, since model and host split such words again.
"""

import string
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)

from vllm_tts_cache.testing.tiny_checkpoint import EncoderSize, TransformerSizes
from vllm_tts_cache.testing.tiny_parts import save_json

Json = dict[str, object]

# As released: they decide how many positions a reference takes, and what is stored.
PATCH_SIZE = 4
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
QUANTIZER_SCALE = 9
MAX_POSITIONS = 4_096

# Width of the first convolution; every stage doubles it.
ENCODER_DIM: dict[EncoderSize, int] = {"tiny": 8, "real": 128}
# Every stage halves it; there are six.
DECODER_DIM = 128


def model_config(vocab_size: int, encoders: EncoderSize) -> Json:
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
        "patch_size": PATCH_SIZE,
        "feat_dim": LATENT_DIM,
        "residual_lm_num_layers": RESIDUAL_LM.num_layers,
        "residual_lm_no_rope": True,
        "scalar_quantization_latent_dim": QUANTIZER_DIM,
        "scalar_quantization_scale": QUANTIZER_SCALE,
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
    save_json(out / "special_tokens_map.json", special)
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "legacy": True,
        "model_max_length": 32_768,
        **special,
    }
    save_json(out / "tokenizer_config.json", config)
