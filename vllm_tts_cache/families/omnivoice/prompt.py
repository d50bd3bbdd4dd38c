"""A clone's texts: what none may hold, how a transcript ends, an offline prompt."""

from vllm_tts_cache.families.networks.prompts import OfflinePrompts, Prompt
from vllm_tts_cache.families.omnivoice.family import FAMILY
from vllm_tts_cache.offline import PreparedSpeaker
from vllm_tts_cache.speaker.family import refuse_tokens
from vllm_tts_cache.speaker.reference import FIELD

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


class OmniVoicePrompts(OfflinePrompts):
    """Builds prompts of text: the worker has the tokenizer, and makes the ids."""

    def prompt(self, speaker: PreparedSpeaker, text: str, language: str) -> Prompt:
        """Return the prompt that speaks ``text``; ``Auto`` leaves the language open.

        Raises: InvalidSpeakerError.
        """
        check_text("text", text)
        prompt: Prompt = {"input": text, FIELD: speaker.ref.to_wire()}
        if speaker.ref_text is not None:
            check_text("ref_text", speaker.ref_text)
            prompt["ref_text"] = with_full_stop(speaker.ref_text)
        if language != "Auto":
            prompt["lang"] = language
        return prompt
