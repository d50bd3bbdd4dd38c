"""Prefills what prompts of a voice begin with, before anybody speaks with it."""

import asyncio
import logging
from asyncio import Task
from typing import Any

from vllm_tts_cache.catalogue.records import SpeakerRecord
from vllm_tts_cache.speaker.rpc_client import DECODER_STATS, AsyncWorkers

logger = logging.getLogger("vllm.vllm_tts_cache")

# The newest ones wait: importing thousands must not push out of the KV those that are
# spoken with.
MAX_WAITING = 8
# Two looks in a row that find the engine idle: between two sentences it is not. Where
# requests leave less time between them than a prefill takes, it would begin anew for
# ever, so each that they end doubles the looks, until one ends by itself.
LOOK_SECONDS = 0.25
MIN_LOOKS, MAX_LOOKS = 2, 256
# A prefill of the longest reference takes seconds on a CPU; what hangs is given up.
PREFILL_SECONDS = 60.0


class KVWarming:
    """Prefills voices one after another while nothing is spoken; for the event loop.

    Args:
        speech: The serving class, which may not be whole yet; None if voices are left
            to their first text.
    """

    def __init__(self, speech: Any):
        self._speech: Any = speech
        self._waiting: dict[str, SpeakerRecord] = {}  # by their ids, with that in hand
        self._num_warmed = 0
        self._num_idle_looks, self._min_idle_looks = 0, MIN_LOOKS
        self._task: Task[None] | None = None
        self._in_hand: Task[None] | None = None

    def add(self, record: SpeakerRecord) -> bool:
        """Take a voice whose encodings exist; returns whether it is to be prefilled."""
        if record.audio_sha256 is None or not self.is_possible:
            return False
        if record.ref_text is None and not self._shares_kv:  # no decoder keeps it
            return False
        self._waiting[record.speaker_id] = record
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return True

    def stop(self) -> None:
        """End the prefill in hand, as a request begins; it is made again later."""
        self._num_idle_looks = 0
        if self._in_hand is not None and self._in_hand.cancel():
            self._in_hand = None
            self._min_idle_looks = min(2 * self._min_idle_looks, MAX_LOOKS)

    def delete(self, audio_sha256: str) -> None:
        """Leave the voices of this audio alone: one of them speaks by itself."""
        for id_, record in list(self._waiting.items()):
            if record.audio_sha256 == audio_sha256:
                del self._waiting[id_]

    def shutdown(self) -> None:
        """Begin nothing more."""
        self._speech = None
        if self._task is not None:
            self._task.cancel()

    def stats(self) -> dict[str, int] | None:
        """Count voices that were prefilled, and that wait; None where none can be."""
        if not self.is_possible:
            return None
        return {"warmed": self._num_warmed, "waiting": len(self._waiting)}

    @property
    def is_possible(self) -> bool:
        """Whether a voice's first text finds what a prefill leaves behind here."""
        if self._speech is None:
            return False
        family = self._speech.served_family
        if family is None or not (family.decoders or self._shares_kv):
            return False
        # Of several API processes none knows what the others have the engine speak.
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
        self._in_hand = asyncio.create_task(self._prefill(record))
        # No `wait_for`: it would begin to end the prefill only some steps later.
        loop = asyncio.get_running_loop()
        giving_up = loop.call_later(PREFILL_SECONDS, self._in_hand.cancel)
        [error] = await asyncio.gather(self._in_hand, return_exceptions=True)
        giving_up.cancel()
        if self._in_hand is None:  # a request ended it
            return
        self._in_hand, self._min_idle_looks = None, MIN_LOOKS
        if self._waiting.get(id_) is record:  # else it was changed meanwhile
            del self._waiting[id_]
        if error is None:
            self._num_warmed += 1
        else:  # the first text prefills it, unless the voice is gone
            logger.debug("A voice was not prefilled: %r", error)

    @property
    def _is_idle(self) -> bool:
        """Whether this process has the engine speak nothing and encode nothing.

        An engine that pauses, sleeps or has died is not idle.
        """
        engine = self._speech.engine_client
        is_away = engine._paused or engine._sleeping_tags or engine.errored
        num_encodes = self._speech.speakers.encodings.num_flights
        return not (is_away or engine.request_states or num_encodes)

    @property
    def _shares_kv(self) -> bool:
        if not self._speech.served_family.shares_kv:
            return False
        [talker, *_] = self._speech.engine_client.engine.stage_vllm_configs
        return talker is not None and bool(talker.cache_config.enable_prefix_caching)

    async def _prefill(self, record: SpeakerRecord) -> None:
        """Have the engine speak a few frames that nobody hears.

        Cancelled, it ends in the engine as well.

        Raises: TTSCacheError, and what the engine raises.
        """
        engine = self._speech.engine_client
        if not self._shares_kv:
            # A decoder that replays CUDA graphs keeps nothing, and has no answer.
            await AsyncWorkers(engine).call(DECODER_STATS)
        await self._speech.speak_unheard(record)
