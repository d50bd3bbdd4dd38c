"""Write a tiny OmniVoice checkpoint with random weights. Not a model."""

from pathlib import Path

import torch

from vllm_tts_cache.families.networks.higgs_tokenizer.tiny import write_tokenizer
from vllm_tts_cache.families.omnivoice.family import TOKENIZER
from vllm_tts_cache.families.omnivoice.texts import CONTROL_TOKENS
from vllm_tts_cache.testing.tiny_checkpoint import (
    EncoderOptions,
    Report,
    TransformerSizes,
)
from vllm_tts_cache.testing.tiny_parts import (
    END_OF_TEXT,
    WeightBuilder,
    add_layers,
    projected,
    save_byte_tokenizer,
    save_json,
    save_weights,
)

# As released: they decide what is stored of a reference.
_NUM_CODEBOOKS = 8
_AUDIO_VOCAB_SIZE = 1025
_MASK_ID = 1024


_LM = TransformerSizes(
    hidden=64, intermediate=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32
)
# Codes are looked up among the texts' ids as well, before they are left out.
_VOCAB_SIZE = 1088
_MAX_POSITIONS = 4_096
# Of 32: what is spoken is noise after any number of them.
_NUM_STEPS = 8

# Of queries and keys, once they are normed: attention is to see some places more than
# others, or every reference would be the same mean.
_ATTENTION_GAIN = 1.5
_LAYER_GAIN = 2.0
_LOGIT_GAIN = 4.0

_NUM_BYTES = 256


def write(directory: Path, options: EncoderOptions, report: Report) -> None:
    """Fill an empty directory; called through `TINY`.

    With ``real`` encoders the audio tokenizer's encode side has its released size.
    """
    report("text tokenizer")
    tokens = (END_OF_TEXT, *CONTROL_TOKENS)
    ids = {token: _NUM_BYTES + place for place, token in enumerate(tokens)}
    save_byte_tokenizer(directory, ids, end=END_OF_TEXT, pad=END_OF_TEXT)
    report("language model")
    save_json(directory / "config.json", _model_config())
    weights = WeightBuilder(options.seed)
    _add_model(weights)
    save_weights(directory / "model.safetensors", weights.tensors, torch.float32)
    report("audio tokenizer")
    write_tokenizer(directory / TOKENIZER, encoders=options.encoders, seed=options.seed)


def _add_model(weights: WeightBuilder) -> None:
    """Add all of it."""
    size, num_audio = _LM, _NUM_CODEBOOKS * _AUDIO_VOCAB_SIZE
    llm = weights.under("llm")
    llm.normal("embed_tokens.weight", (_VOCAB_SIZE, size.hidden), 1.0)
    add_layers(llm, size, projected(_LAYER_GAIN), qk_norm=_ATTENTION_GAIN)
    # A place is the sum of its codebooks, and as loud as a text's.
    std = _NUM_CODEBOOKS**-0.5
    weights.normal("audio_embeddings.weight", (num_audio, size.hidden), std)
    shape = (num_audio, size.hidden)
    weights.projection("audio_heads.weight", shape, _LOGIT_GAIN)


def _model_config() -> dict[str, object]:
    """Everything about the model but its audio tokenizer."""
    return {
        "architectures": ["OmniVoice"],
        "model_type": "omnivoice",
        "audio_vocab_size": _AUDIO_VOCAB_SIZE,
        "audio_mask_id": _MASK_ID,
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
            "max_position_embeddings": _MAX_POSITIONS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        # The host's alone.
        "num_step": _NUM_STEPS,
    }
