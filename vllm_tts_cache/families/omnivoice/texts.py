"""The texts of a clone's prompt: control tokens, and how a transcript ends."""

# The model takes these for the parts of a prompt, wherever they stand.
CONTROL_TOKENS = (
    *("<|denoise|>", "<|lang_start|>", "<|lang_end|>", "<|instruct_start|>"),
    *("<|instruct_end|>", "<|text_start|>", "<|text_end|>"),
)
# A transcript that ends in one of these needs no full stop.
_ENDS = frozenset(";:,.!?…)]}\"'“”‘’；：，。！？、）】")  # noqa: RUF001


def with_full_stop(transcript: str) -> str:
    """End a transcript with punctuation, so that the text begins a new sentence.

    Source: ``add_punctuation`` of omnivoice 0.2.1.
    """
    text = transcript.strip()
    if not text or text[-1] in _ENDS:
        return text
    is_chinese = any("\u4e00" <= char <= "\u9fff" for char in text)
    return text + ("。" if is_chinese else ".")
