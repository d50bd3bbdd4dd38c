"""The texts of a clone's prompt: control tokens, and how a transcript ends."""

# What the model takes for the parts of a prompt, wherever it stands.
CONTROL_TOKENS = (
    "<|denoise|>",
    "<|lang_start|>",
    "<|lang_end|>",
    "<|instruct_start|>",
    "<|instruct_end|>",
    "<|text_start|>",
    "<|text_end|>",
)
# With one of these at its end a transcript needs no full stop.
_ENDS = frozenset(";:,.!?…)]}\"'“”‘’；：，。！？、）】")  # noqa: RUF001


def with_full_stop(transcript: str) -> str:
    """End a transcript as the model knows it: what follows is another sentence.

    Source: ``add_punctuation`` of omnivoice 0.2.1.
    """
    text = transcript.strip()
    if not text or text[-1] in _ENDS:
        return text
    is_chinese = any("\u4e00" <= char <= "\u9fff" for char in text)
    return text + ("。" if is_chinese else ".")
