"""Prefills what all prompts of a voice begin with, before its first request."""

import asyncio
from typing import Any

from vllm_tts_cache.catalogue.records import SpeakerRecord
from vllm_tts_cache.logs import logger
from vllm_tts_cache.speaker.rpc_client import DECODER_STATS, AsyncWorkers

# Only the newest wait: importing thousands must not evict the KV of voices that
# requests speak with.
MAX_WAITING = 8
# Two looks in a row must find the engine idle: pauses between sentences are shorter.
# Where requests leave less time between them than a prefill takes, it would begin anew
# for ever, so each cancelled prefill doubles the looks, until one runs to its end.
LOOK_SECONDS = 0.25
MIN_LOOKS, MAX_LOOKS = 2, 256
# A prefill of the longest reference takes seconds on a CPU; a hanging one is cancelled.
PREFILL_SECONDS = 60.0


class KVWarming:
    """Prefills voices one after another while the engine is idle; for the event loop.

    Args:
        speech: The serving class, which may not be set up yet; None: no voice is
            prefilled.
    """

    def __init__(self, speech: Any):
        self._speech: Any = speech
        self._waiting: dict[str, SpeakerRecord] = {}  # by id, the current one too
        self._num_warmed = 0
        self._num_idle_looks, self._min_idle_looks = 0, MIN_LOOKS
        self._task: asyncio.Task[None] | None = None
        self._prefilling: asyncio.Task[None] | None = None

    def add(self, record: SpeakerRecord) -> bool:
        """Queue a voice whose encodings exist; returns whether it will be prefilled."""
        if record.audio_sha256 is None or not self.is_possible:
            return False
        if record.ref_text is None and not self._shares_kv:  # decoders keep no state
            return False
        self._waiting[record.speaker_id] = record
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return True

    def stop(self) -> None:
        """Cancel the running prefill because a request begins; it is repeated later."""
        self._num_idle_looks = 0
        if self._prefilling is not None and self._prefilling.cancel():
            self._prefilling = None
            self._min_idle_looks = min(2 * self._min_idle_looks, MAX_LOOKS)

    def delete(self, speaker_id: str) -> None:
        """Remove a voice that was deleted."""
        self._waiting.pop(speaker_id, None)

    def delete_all(self) -> None:
        """Remove all voices."""
        self._waiting.clear()

    def skip_spoken(self, audio_sha256: str) -> None:
        """Remove this audio's voices, as a request that speaks with one prefills it."""
        for id_, record in list(self._waiting.items()):
            if record.audio_sha256 == audio_sha256:
                del self._waiting[id_]

    def shutdown(self) -> None:
        """Cancel the running prefill, and begin no other."""
        self._speech = None
        if self._task is not None:
            self._task.cancel()

    def stats(self) -> dict[str, int] | None:
        """Return how many voices were prefilled and how many wait; None if none can."""
        if not self.is_possible:
            return None
        return {"warmed": self._num_warmed, "waiting": len(self._waiting)}

    @property
    def is_possible(self) -> bool:
        """Whether a prefill leaves something here that a voice's first text uses."""
        if self._speech is None:
            return False
        family = self._speech.served_family
        if family is None or not (family.decoders or self._shares_kv):
            return False
        # Of several API processes none knows whether the others keep the engine busy.
        config = self._speech.engine_client.engine._client_config or {}
        return int(config.get("client_count", 1)) == 1

    async def _run(self) -> None:
        while self._waiting:
            self._num_idle_looks = 0
            while self._num_idle_looks < self._min_idle_looks:
                await asyncio.sleep(LOOK_SECONDS)
                self._num_idle_looks = self._num_idle_looks + 1 if self._is_idle else 0
            if self._waiting:
                await self._prefill_first()

    async def _prefill_first(self) -> None:
        id_, record = next(iter(self._waiting.items()))
        self._prefilling = asyncio.create_task(self._prefill(record))
        # Not by `wait_for`, which would pass a cancellation on only some steps later.
        loop = asyncio.get_running_loop()
        giving_up = loop.call_later(PREFILL_SECONDS, self._prefilling.cancel)
        [error] = await asyncio.gather(self._prefilling, return_exceptions=True)
        giving_up.cancel()
        if self._prefilling is None:  # a request cancelled it
            return
        self._prefilling, self._min_idle_looks = None, MIN_LOOKS
        if self._waiting.get(id_) is record:  # else it was changed meanwhile
            del self._waiting[id_]
        if error is None:
            self._num_warmed += 1
        else:  # the first text prefills it, unless the voice is gone
            logger.debug("A voice was not prefilled: %r", error)

    @property
    def _is_idle(self) -> bool:
        """Whether the engine neither speaks nor encodes for this process.

        An engine that pauses, sleeps or has died is not idle.
        """
        engine = self._speech.engine_client
        is_away = engine._paused or engine._sleeping_tags or engine.errored
        num_encodes = len(self._speech.speakers.encodings.pending)
        return not (is_away or engine.request_states or num_encodes)

    @property
    def _shares_kv(self) -> bool:
        if not self._speech.served_family.shares_kv:
            return False
        [talker, *_] = self._speech.engine_client.engine.stage_vllm_configs
        return talker is not None and bool(talker.cache_config.enable_prefix_caching)

    async def _prefill(self, record: SpeakerRecord) -> None:
        """Have the engine speak a few frames, which are dropped.

        If it is cancelled, it ends in the engine as well.

        Raises: TTSCacheError, and what the engine raises.
        """
        engine = self._speech.engine_client
        if not self._shares_kv:
            # Raises if the decoder replays CUDA graphs: then it keeps no states.
            await AsyncWorkers(engine).call(DECODER_STATS)
        await self._speech.speak_unheard(record)
