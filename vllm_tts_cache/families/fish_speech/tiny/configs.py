"""The JSON files of a checkpoint, and its tokenizer; field names as released."""

from pathlib import Path

from vllm_tts_cache.families.fish_speech.tiny import sizes
from vllm_tts_cache.families.fish_speech.tiny.sizes import CodecSizes, TransformerSizes
from vllm_tts_cache.testing.tiny_parts import save_byte_tokenizer

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
AUDIO_PAD = "<|audio_pad|>"
FIRST_SEMANTIC_ID = 151_678
LAST_SEMANTIC_ID = FIRST_SEMANTIC_ID + sizes.SEMANTIC_CODEBOOK_SIZE - 1
# Where the released tokenizer has them.
CONTROL_IDS: dict[str, int] = {
    END_OF_TEXT: 151_643,
    IM_START: 151_644,
    IM_END: 151_645,
    **{f"<|speaker:{i}|>": 151_650 + i for i in range(8)},
    "<|phoneme_start|>": 151_671,
    "<|phoneme_end|>": 151_672,
    "<|voice|>": 151_673,
    "<|text|>": 151_674,
    "<|audio_start|>": 151_675,
    "<|audio_end|>": 151_676,
    AUDIO_PAD: 151_677,
}

Json = dict[str, object]


def model_config() -> Json:
    """``config.json``."""
    return {
        "architectures": ["FishSpeechSlowARForConditionalGeneration"],
        "model_type": "fish_qwen3_omni",
        "dtype": "bfloat16",
        "semantic_start_token_id": FIRST_SEMANTIC_ID,
        "semantic_end_token_id": LAST_SEMANTIC_ID,
        "audio_pad_token_id": CONTROL_IDS[AUDIO_PAD],
        **_end_ids(),
        "tie_word_embeddings": True,
        "text_config": _slow_ar_config(),
        "audio_decoder_config": _fast_ar_config(),
    }


def generation_config() -> Json:
    """``generation_config.json``."""
    return _end_ids()


def codec_config(size: CodecSizes) -> Json:
    """``codec.json``, which no released checkpoint has: sizes of a smaller codec."""
    return {
        "encoder_dim": size.encoder_dim,
        "decoder_dim": size.decoder_dim,
        "quantizer_layers": size.quantizer_layers,
        "encoder_layers": size.encoder_layers,
    }


def _end_ids() -> Json:
    return {
        "eos_token_id": CONTROL_IDS[IM_END],
        "pad_token_id": CONTROL_IDS[END_OF_TEXT],
    }


def _transformer(size: TransformerSizes) -> Json:
    return {
        "dim": size.hidden,
        "intermediate_size": size.intermediate,
        "n_layer": size.num_layers,
        "n_head": size.num_heads,
        "n_local_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "num_codebooks": sizes.NUM_CODEBOOKS,
        "rope_base": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
    }


def _slow_ar_config() -> Json:
    return {
        "model_type": "fish_qwen3",
        **_transformer(sizes.SLOW_AR),
        "vocab_size": sizes.VOCAB_SIZE,
        "codebook_size": sizes.SEMANTIC_CODEBOOK_SIZE,
        "attention_qk_norm": True,
        "max_seq_len": 32_768,
        "tie_word_embeddings": True,
    }


def _fast_ar_config() -> Json:
    return {
        "model_type": "fish_qwen3_audio_decoder",
        **_transformer(sizes.FAST_AR),
        "vocab_size": sizes.SEMANTIC_CODEBOOK_SIZE,
        "attention_qk_norm": False,
        "max_seq_len": sizes.NUM_CODEBOOKS + 1,
        "text_dim": sizes.SLOW_AR.hidden,
        "audio_hidden_dim": 2 * sizes.FAST_AR.hidden,
    }


def save_text_tokenizer(out: Path) -> None:
    """Write ``tokenizer.json`` and the two files that say which tokens are special."""
    special = CONTROL_IDS | {
        f"<|semantic:{code}|>": FIRST_SEMANTIC_ID + code
        for code in range(sizes.SEMANTIC_CODEBOOK_SIZE)
    }
    save_byte_tokenizer(
        out, special, end=IM_END, pad=END_OF_TEXT, vocab_size=sizes.VOCAB_SIZE
    )
