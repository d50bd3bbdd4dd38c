"""A request that prefills what a voice's prompts begin with, and says nothing."""

import uuid
from typing import Any

from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest

from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.entrypoints.callers import speaking_for
from vllm_tts_cache.tenants import Tenant

# Any text does: what is shared ends before it.
_TEXT = "Hello."


class VoicePrefill:
    """The engine of a serving class, asked for a prefill.

    Args:
        speech: The serving class, which may not be whole yet.
    """

    def __init__(self, speech: Any):
        self._speech = speech

    @property
    def is_possible(self) -> bool:
        """Whether texts of a voice share KV here, and no other process speaks."""
        family = self._speech.served_family
        if family is None or not family.shares_kv:
            return False
        engine = self._speech.engine_client.engine
        [talker, *_] = engine.stage_vllm_configs
        # One of several processes does not know whether the others speak.
        shared = (engine._client_config or {}).get("client_count", 1)
        if talker is None or int(shared) > 1:
            return False
        return bool(talker.cache_config.enable_prefix_caching)

    @property
    def is_idle(self) -> bool:
        """Whether this process has the engine speak nothing."""
        return not self._speech.engine_client.request_states

    async def prefill(self, record: SpeakerRecord) -> None:
        """Return when the voice's part of a prompt has been prefilled.

        Raises: TTSCacheError, and what the engine raises.
        """
        request = OpenAICreateSpeechRequest(input=_TEXT, voice=record.name)
        engine = self._speech.engine_client
        adapter = self._speech.cached_adapter
        name = f"prefill-{uuid.uuid4().hex}"
        with speaking_for(Tenant(name=record.tenant)):
            prepared = await adapter.tts_cache_prepared(request)
        params = adapter.apply_sampling_overrides(
            [each.clone() for each in engine.default_sampling_params_list],
            request,
            prepared.prompt,
            name,
        )
        params[0].max_tokens, params[0].min_tokens = 1, 0
        outputs = engine.generate(
            prompt=prepared.prompt, request_id=name, sampling_params_list=params
        )
        async for _ in outputs:
            pass
