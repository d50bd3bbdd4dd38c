"""The JSON files of a checkpoint, their sizes, and its tokenizer; names as released."""

from pathlib import Path

from vllm_tts_cache.families.fish_speech.sizes import RELEASED, CodecSizes
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_checkpoint import EncoderSize, TransformerSizes

# Fixed by the released model, whatever the size of the networks. The host compares
# generated ids with some of the text ids as numbers, so all of them stay.
VOCAB_SIZE = 155_776
NUM_CODEBOOKS = 10
SEMANTIC_CODEBOOK_SIZE = 4_096
RESIDUAL_CODEBOOK_SIZE = 1_024
CODEBOOK_DIM = 8
ENCODER_RATES, DECODER_RATES = (2, 4, 8, 8), (8, 8, 4, 2)
HEAD_DIM_IN_CODEC = 64

SLOW_AR = TransformerSizes(
    hidden=256, intermediate=768, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64
)
FAST_AR = TransformerSizes(
    hidden=256, intermediate=768, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64
)
CODEC: dict[EncoderSize, CodecSizes] = {
    "tiny": CodecSizes(
        encoder_dim=8, decoder_dim=96, quantizer_layers=1, encoder_layers=1
    ),
    "real": RELEASED,
}

AUDIO_PAD = "<|audio_pad|>"
FIRST_SEMANTIC_ID = 151_678
LAST_SEMANTIC_ID = FIRST_SEMANTIC_ID + SEMANTIC_CODEBOOK_SIZE - 1
# Where the released tokenizer has them.
CONTROL_IDS: dict[str, int] = {
    parts.END_OF_TEXT: 151_643,
    parts.IM_START: 151_644,
    parts.IM_END: 151_645,
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
    """Return ``config.json``."""
    return {
        "architectures": ["FishSpeechSlowARForConditionalGeneration"],
        "model_type": "fish_qwen3_omni",
        "dtype": "bfloat16",
        "semantic_start_token_id": FIRST_SEMANTIC_ID,
        "semantic_end_token_id": LAST_SEMANTIC_ID,
        "audio_pad_token_id": CONTROL_IDS[AUDIO_PAD],
        **end_ids(),
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "fish_qwen3",
            **_transformer(SLOW_AR),
            "vocab_size": VOCAB_SIZE,
            "codebook_size": SEMANTIC_CODEBOOK_SIZE,
            "attention_qk_norm": True,
            "max_seq_len": 32_768,
            "tie_word_embeddings": True,
        },
        "audio_decoder_config": {
            "model_type": "fish_qwen3_audio_decoder",
            **_transformer(FAST_AR),
            "vocab_size": SEMANTIC_CODEBOOK_SIZE,
            "attention_qk_norm": False,
            "max_seq_len": NUM_CODEBOOKS + 1,
            "text_dim": SLOW_AR.hidden,
            "audio_hidden_dim": 2 * FAST_AR.hidden,
        },
    }


def end_ids() -> Json:
    """Return the ids of the end and padding tokens, as two files have them."""
    return {
        "eos_token_id": CONTROL_IDS[parts.IM_END],
        "pad_token_id": CONTROL_IDS[parts.END_OF_TEXT],
    }


def _transformer(size: TransformerSizes) -> Json:
    return {
        "dim": size.hidden,
        "intermediate_size": size.intermediate,
        "n_layer": size.num_layers,
        "n_head": size.num_heads,
        "n_local_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "num_codebooks": NUM_CODEBOOKS,
        "rope_base": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
    }


def save_text_tokenizer(out: Path) -> None:
    """Write ``tokenizer.json`` and the two files that say which tokens are special."""
    special = CONTROL_IDS | {
        f"<|semantic:{code}|>": FIRST_SEMANTIC_ID + code
        for code in range(SEMANTIC_CODEBOOK_SIZE)
    }
    parts.save_byte_tokenizer(
        out, special, end=parts.IM_END, pad=parts.END_OF_TEXT, vocab_size=VOCAB_SIZE
    )
