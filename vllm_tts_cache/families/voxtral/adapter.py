"""Requests to Voxtral are the host's; a clone that cannot be is refused before it."""

from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest
from vllm_omni.entrypoints.openai.tts_adapters.voxtral import VoxtralTTSAdapter

from vllm_tts_cache.entrypoints.serving.adapter import CachedAdapter, Speaker
from vllm_tts_cache.families.voxtral.family import FAMILY


class CachedVoxtralAdapter(CachedAdapter, VoxtralTTSAdapter):
    """The host's adapter, with a word to clients whose reference audio it ignores."""

    tts_cache_family = FAMILY

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Never called: the family has no modes."""
        raise NotImplementedError
