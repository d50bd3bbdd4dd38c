"""A clone request on OmniVoice becomes a content address and a transcript."""

from typing import Any

from vllm_tts_cache.entrypoints.serving.adapter import DiffusionAdapter
from vllm_tts_cache.families.omnivoice.family import FAMILY
from vllm_tts_cache.families.omnivoice.limits import check_request
from vllm_tts_cache.families.omnivoice.prompt import check_text, with_full_stop


class CachedOmniVoiceAdapter(DiffusionAdapter):
    """Our adapter; the host adds text, language and instructions to its prompts."""

    # The host's name of its own adapter, which serves this model in AR stages.
    name = "omnivoice"
    tts_cache_family = FAMILY

    def validate(self, request: Any) -> str | None:
        """Refuse what `check_request` refuses. Raises: InvalidSpeakerError."""
        check_request(request)
        return super().validate(request)

    def tts_cache_check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would misread. Raises: InvalidSpeakerError."""
        check_text(field, text)

    def tts_cache_transcript(self, ref_text: str) -> str:
        """End a transcript as the official package does."""
        return with_full_stop(ref_text)
