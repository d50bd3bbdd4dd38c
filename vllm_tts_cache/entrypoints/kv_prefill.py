"""A request that leaves behind what depends on its voice alone, and says nothing."""

import uuid
from typing import Any

from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest

from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.entrypoints.callers import speaking_for
from vllm_tts_cache.speaker.rpc_client import (
    DECODER_STATS,
    AsyncWorkers,
    UnsupportedModelError,
)
from vllm_tts_cache.tenants import Tenant

# Any text does: what is left behind is of what comes before it.
_TEXT = "Hello."
# A decoder hears of a voice with the first frames that are spoken.
NUM_FRAMES = 3


class VoicePrefill:
    """The engine of a serving class, asked for a prefill.

    Args:
        speech: The serving class, which may not be whole yet.
        keeps_states: Whether decoders may keep what they have computed of a voice.
    """

    def __init__(self, speech: Any, *, keeps_states: bool):
        self._speech = speech
        self._keeps_states = keeps_states
        self._has_asked = False

    @property
    def is_possible(self) -> bool:
        """Whether a request leaves behind what a voice's next one finds.

        And whether no other process speaks: one of several does not know.
        """
        return (self._shares_kv or self._has_decoder) and self._is_alone

    def helps(self, record: SpeakerRecord) -> bool:
        """Whether that is so of this voice: without a transcript it has less."""
        return self._shares_kv or record.ref_text is not None

    @property
    def _is_alone(self) -> bool:
        config = self._speech.engine_client.engine._client_config or {}
        return int(config.get("client_count", 1)) == 1

    @property
    def _shares_kv(self) -> bool:
        family = self._speech.served_family
        if family is None or not family.shares_kv:
            return False
        [talker, *_] = self._speech.engine_client.engine.stage_vllm_configs
        return talker is not None and bool(talker.cache_config.enable_prefix_caching)

    @property
    def _has_decoder(self) -> bool:
        family = self._speech.served_family
        return self._keeps_states and family is not None and bool(family.decoders)

    @property
    def is_idle(self) -> bool:
        """Whether this process has the engine speak nothing, and it could.

        What is asked of one that pauses, sleeps or has died is not among its requests.
        """
        engine = self._speech.engine_client
        is_away = engine._paused or engine._sleeping_tags or engine.errored
        return not (is_away or engine.request_states)

    async def prefill(self, record: SpeakerRecord) -> None:
        """Return when the voice's part of a prompt has been prefilled.

        Raises: TTSCacheError, and what the engine raises. UnsupportedModelError if
            nothing would be left behind, which is found with the first voice.
        """
        if not self._shares_kv:
            await self._ask_decoder()
        # By its id: it may have got another name since.
        request = OpenAICreateSpeechRequest(input=_TEXT, voice=record.speaker_id)
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
        params[0].max_tokens, params[0].min_tokens = NUM_FRAMES, NUM_FRAMES
        outputs = engine.generate(
            prompt=prepared.prompt, request_id=name, sampling_params_list=params
        )
        async for _ in outputs:
            pass

    async def _ask_decoder(self) -> None:
        """Learn once whether it keeps states; one that replays CUDA graphs does not.

        Raises: UnsupportedModelError if not; another WorkerRPCError if nobody answers.
        """
        if self._has_asked:
            return
        workers = AsyncWorkers(self._speech.engine_client)
        try:
            await workers.call(DECODER_STATS)
        except UnsupportedModelError:
            self._keeps_states = False
            raise
        self._has_asked = True
