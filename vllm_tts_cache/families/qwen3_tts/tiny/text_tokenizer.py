"""Qwen3-TTS's own tokens, behind those that every tokenizer of Qwen's has."""

from vllm_tts_cache.testing import tiny_parts
from vllm_tts_cache.testing.tiny_parts import TextTokenizer

TTS_PAD, TTS_BOS, TTS_EOS = "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"
_SPECIAL_TOKENS = (
    *tiny_parts.SPECIAL_TOKENS,
    TTS_PAD,
    TTS_BOS,
    TTS_EOS,
    "<tts_text_bos_single>",
    "<|audio_start|>",
    "<|audio_end|>",
)


def train_text_tokenizer() -> TextTokenizer:
    """Train on a few sentences; the result is always the same."""
    return tiny_parts.train_text_tokenizer(_SPECIAL_TOKENS)
