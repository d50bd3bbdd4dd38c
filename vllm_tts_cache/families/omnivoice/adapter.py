"""A clone request on OmniVoice: its prompt names the codes, and has the transcript."""

from typing import Any

from vllm_tts_cache.entrypoints.serving.adapter import TextCheckingAdapter
from vllm_tts_cache.entrypoints.serving.diffusion import DiffusionAdapter
from vllm_tts_cache.families.networks.prompts import refuse_tokens
from vllm_tts_cache.families.omnivoice.family import FAMILY
from vllm_tts_cache.families.omnivoice.limits import check_request
from vllm_tts_cache.families.omnivoice.texts import CONTROL_TOKENS, with_full_stop


class CachedOmniVoiceAdapter(TextCheckingAdapter, DiffusionAdapter):
    """The host builds the rest of the prompt: text, language and instructions."""

    # As the host calls the adapter that it has for this model beside a talker.
    name = "omnivoice"
    tts_cache_family = FAMILY

    def validate(self, request: Any) -> str | None:
        """Refuse control tokens in what the host puts into a prompt beside the texts.

        Raises: InvalidSpeakerError.
        """
        check_request(request)
        for field in ("language", "instructions", "ref_text"):
            refuse_tokens(CONTROL_TOKENS, field, getattr(request, field) or "")
        return super().validate(request)

    def tts_cache_check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would read as something else.

        Raises: InvalidSpeakerError.
        """
        refuse_tokens(CONTROL_TOKENS, field, text)

    def tts_cache_transcript(self, ref_text: str) -> str:
        """End it as the official package does."""
        return with_full_stop(ref_text)
