"""Write a tiny OmniVoice checkpoint with random weights. Not a model."""

from pathlib import Path

import torch

from vllm_tts_cache.families.networks.higgs_tokenizer.tiny import write_tokenizer
from vllm_tts_cache.families.omnivoice.family import FAMILY, TOKENIZER
from vllm_tts_cache.testing import tiny_checkpoint as tiny
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

# As released: they decide what is stored of a reference.
_NUM_CODEBOOKS = 8
_AUDIO_VOCAB_SIZE = 1025

_LM = tiny.TransformerSizes(
    hidden=64, intermediate=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32
)
# Codes index the texts' table as well, before the host discards those rows.
_VOCAB_SIZE = 1088

# Gain of queries and keys after their norm: attention must weigh some positions more
# than others, or every reference would give the same mean.
_ATTENTION_GAIN = 1.5
_LAYER_GAIN = 2.0
_LOGIT_GAIN = 4.0

_NUM_BYTES = 256


def write(directory: Path, options: tiny.EncoderOptions, report: tiny.Report) -> None:
    """Fill an empty directory; called as the family's ``tiny_part``.

    With ``real`` encoders the audio tokenizer's encode side has its released size.
    """
    report("text tokenizer")
    end = parts.END_OF_TEXT
    tokens = (end, *FAMILY.control.names)
    ids = {token: _NUM_BYTES + place for place, token in enumerate(tokens)}
    parts.save_byte_tokenizer(directory, ids, end=end, pad=end)
    report("language model")
    parts.save_json(directory / "config.json", _model_config())
    weights = WeightBuilder(options.seed)
    _add_model(weights)
    parts.save_weights(directory / "model.safetensors", weights.tensors, torch.float32)
    report("audio tokenizer")
    write_tokenizer(directory / TOKENIZER, encoders=options.encoders, seed=options.seed)


def _add_model(weights: WeightBuilder) -> None:
    """Add all weights but the audio tokenizer's."""
    llm = weights.under("llm")
    llm.normal("embed_tokens.weight", (_VOCAB_SIZE, _LM.hidden), 1.0)
    rules = {"[qk]_norm": parts.constant(_ATTENTION_GAIN)}
    parts.add_layers(llm, _LM, "qwen3", parts.projected(_LAYER_GAIN), rules)
    shape = _NUM_CODEBOOKS * _AUDIO_VOCAB_SIZE, _LM.hidden
    # A position is the sum of its codebooks' rows, and has a text row's variance.
    weights.normal("audio_embeddings.weight", shape, _NUM_CODEBOOKS**-0.5)
    weights.projection("audio_heads.weight", shape, _LOGIT_GAIN)


def _model_config() -> dict[str, object]:
    return {
        "architectures": ["OmniVoice"],
        "model_type": "omnivoice",
        "audio_vocab_size": _AUDIO_VOCAB_SIZE,
        "audio_mask_id": 1024,
        "num_audio_codebook": _NUM_CODEBOOKS,
        "audio_codebook_weights": [8, 8, 6, 6, 4, 4, 2, 2],
        "llm_config": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": _VOCAB_SIZE,
            **_LM.config,
            "head_dim": _LM.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": 4_096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        # Only the host reads it. Released are 32: here the output is always noise.
        "num_step": 8,
    }
