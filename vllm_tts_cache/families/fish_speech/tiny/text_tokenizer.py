"""A byte-level tokenizer with the released vocabulary's size and control tokens."""

from pathlib import Path

from vllm_tts_cache.families.fish_speech.tiny import sizes
from vllm_tts_cache.testing.byte_tokenizer import save_byte_tokenizer

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


def save_text_tokenizer(out: Path) -> None:
    """Write ``tokenizer.json`` and the two files that say which tokens are special."""
    special = CONTROL_IDS | {
        f"<|semantic:{code}|>": FIRST_SEMANTIC_ID + code
        for code in range(sizes.SEMANTIC_CODEBOOK_SIZE)
    }
    save_byte_tokenizer(
        out, special, end=IM_END, pad=END_OF_TEXT, vocab_size=sizes.VOCAB_SIZE
    )
