"""The texts of a clone's prompt: what none may hold, and how a transcript ends."""

from vllm_tts_cache.families.omnivoice.family import FAMILY
from vllm_tts_cache.speaker.family import refuse_tokens

# A transcript that ends in one of these needs no full stop.
_ENDS = frozenset(";:,.!?…)]}\"'“”‘’；：，。！？、）】")  # noqa: RUF001


def check_text(field: str, text: str) -> None:
    """Refuse a control token in a text as the worker reads it, without line breaks.

    Raises: InvalidSpeakerError.
    """
    joined = text.replace("\n", "").replace("\r", "")
    refuse_tokens(FAMILY.control.names, field, joined)


def with_full_stop(transcript: str) -> str:
    """End a transcript with punctuation, so that the text begins a new sentence.

    Source: ``add_punctuation`` of omnivoice 0.2.1.
    """
    text = transcript.strip()
    if not text or text[-1] in _ENDS:
        return text
    is_chinese = any("\u4e00" <= char <= "\u9fff" for char in text)
    return text + ("。" if is_chinese else ".")
