"""The released tokenizer's control tokens over a token for each byte."""

from pathlib import Path

from vllm_tts_cache.testing.byte_tokenizer import save_byte_tokenizer

END_OF_TEXT = "<|endoftext|>"

# The first and the last are where the released tokenizer has them: the host's pipeline
# stops at their ids.
CONTROL_IDS: dict[str, int] = {
    END_OF_TEXT: 151_643,
    "<|im_start|>": 151_644,
    "<|im_end|>": 151_645,
    "<|tts|>": 151_666,
    "<|ref_text|>": 151_667,
    "<|ref_audio|>": 151_668,
    "<|text|>": 151_669,
    "<|audio|>": 151_670,
    "<|audio_end|>": 151_671,
}


def save_text_tokenizer(out: Path) -> None:
    """Write the files of the checkpoint's own tokenizer."""
    save_byte_tokenizer(out, CONTROL_IDS, end=END_OF_TEXT, pad=END_OF_TEXT)
