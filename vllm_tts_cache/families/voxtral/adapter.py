"""Requests to Voxtral go to the host; a clone that is impossible is refused first."""

from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest
from vllm_omni.entrypoints.openai.tts_adapters.voxtral import VoxtralTTSAdapter

from vllm_tts_cache.entrypoints.serving.adapter import CachedAdapter, Speaker
from vllm_tts_cache.families.voxtral.family import FAMILY


class CachedVoxtralAdapter(CachedAdapter, VoxtralTTSAdapter):
    """The host's adapter; it refuses reference audio that the host would ignore."""

    tts_cache_family = FAMILY

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Never called: the family has no modes."""
        raise NotImplementedError
