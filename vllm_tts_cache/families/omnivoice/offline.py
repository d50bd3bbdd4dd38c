"""Prompts for OmniVoice in an ``Omni`` engine: a text and a content address."""

from vllm_tts_cache.families.networks.prompts import OfflinePrompts, Prompt
from vllm_tts_cache.families.omnivoice.texts import check_text, with_full_stop
from vllm_tts_cache.offline import PreparedSpeaker
from vllm_tts_cache.speaker.reference import FIELD


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
