"""``config.json``, its field names as released, and a byte-level tokenizer."""

from pathlib import Path

from vllm_tts_cache.families.omnivoice.texts import CONTROL_TOKENS
from vllm_tts_cache.families.omnivoice.tiny import sizes
from vllm_tts_cache.testing.tiny_parts import save_byte_tokenizer

END_OF_TEXT = "<|endoftext|>"
_NUM_BYTES = 256

Json = dict[str, object]


def model_config() -> Json:
    """Everything about the model but its audio tokenizer."""
    return {
        "architectures": ["OmniVoice"],
        "model_type": "omnivoice",
        "audio_vocab_size": sizes.AUDIO_VOCAB_SIZE,
        "audio_mask_id": sizes.MASK_ID,
        "num_audio_codebook": sizes.NUM_CODEBOOKS,
        "audio_codebook_weights": [8, 8, 6, 6, 4, 4, 2, 2],
        "llm_config": _llm_config(),
        # The host's alone.
        "num_step": sizes.NUM_STEPS,
    }


def _llm_config() -> Json:
    size = sizes.LM
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": sizes.VOCAB_SIZE,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": sizes.MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    }


def save_text_tokenizer(out: Path) -> None:
    """Write the files of the checkpoint's own tokenizer."""
    tokens = (END_OF_TEXT, *CONTROL_TOKENS)
    ids = {token: _NUM_BYTES + place for place, token in enumerate(tokens)}
    save_byte_tokenizer(out, ids, end=END_OF_TEXT, pad=END_OF_TEXT)
