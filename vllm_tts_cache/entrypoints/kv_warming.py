"""Has the engine prefill what a voice's prompts begin with, before anybody speaks."""

import asyncio
import logging
import time
from asyncio import Task
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Protocol

from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.entrypoints.metrics.series import process_metrics
from vllm_tts_cache.errors import SpeakerNotFoundError

logger = logging.getLogger("vllm.vllm_tts_cache")

# Of voices that nobody has spoken with since: importing thousands must not push those
# that are spoken with out of the KV.
MAX_UNSPOKEN = 16
UNSPOKEN_SECONDS = 600.0
# Two looks in a row that find the engine idle: between two sentences it is not.
LOOK_SECONDS = 0.25
# A prefill of the longest reference takes seconds on a CPU; what hangs is given up.
PREFILL_SECONDS = 60.0
# Where requests leave less time between them than a prefill takes, it would begin anew
# for ever, and each end is an aborted request in the engine's metrics.
MAX_STOPS = 3
# Of those that spoke before a restart: some room is left for new ones.
MAX_AGAIN = 8

# What a voice's prompts begin with is made of its audio and, if it has one, of its
# transcript: another one makes it another beginning.
Beginning = tuple[str, str | None]


class Prefill(Protocol):
    """What is asked of the engine.

    Attributes:
        is_possible: Whether a request finds what another one of its voice has left
            behind, in the KV or in the decoder, and nobody else has the engine speak.
        is_idle: Whether nothing is spoken, and something could be.
    """

    @property
    def is_possible(self) -> bool: ...  # noqa: D102

    @property
    def is_idle(self) -> bool: ...  # noqa: D102

    def helps(self, record: SpeakerRecord) -> bool:
        """Whether that is so of this voice."""
        ...

    async def prefill(self, record: SpeakerRecord) -> None:
        """Return when the voice's part of a prompt has been prefilled.

        Cancelled, it ends in the engine as well.
        """
        ...


@dataclass(slots=True)
class WarmingCounts:
    """What became of voices that were precomputed.

    Attributes:
        warmed: Prefilled.
        failed: The engine did not.
        left_out: Too many others were waiting, or had not been spoken with yet; or
            requests ended it again and again.
    """

    warmed: int = 0
    failed: int = 0
    left_out: int = 0


class KVWarming:
    """Voices one after another, while the engine has nothing to do; on its event loop.

    Args:
        engine: Does it; None where none can.
        is_on: Whether the operator wants it.
    """

    def __init__(self, engine: Prefill | None, *, is_on: bool):
        self._engine = engine if is_on else None
        self._waiting: OrderedDict[Beginning, SpeakerRecord] = OrderedDict()
        self._unspoken: OrderedDict[Beginning, float] = OrderedDict()
        # Of those that wait, or are in hand.
        self._num_stops: dict[Beginning, int] = {}
        self._counts = WarmingCounts()
        self._task: Task[None] | None = None
        self._in_hand: tuple[Beginning, SpeakerRecord, Task[None]] | None = None

    def add(self, record: SpeakerRecord) -> bool:
        """Take a voice whose encodings exist; it is prefilled soon, or left out.

        Returns: Whether it waits.
        """
        sha = record.audio_sha256
        if sha is None or (engine := self._possible) is None:
            return False
        if not engine.helps(record):
            return False
        beginning = sha, record.ref_text
        num_unspoken = self._num_unspoken()  # which forgets those of long ago
        if beginning in self._unspoken:
            return False
        self._delete_waiting(record, but=beginning)
        if beginning in self._waiting:
            return True
        if num_unspoken + len(self._waiting) >= MAX_UNSPOKEN:
            self._count("left_out")
            return False
        self._waiting[beginning] = record
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(engine))
        return True

    def give_way(self) -> None:
        """A request begins: whose prefill is in hand, that voice waits again."""
        if (stopped := self._stop()) is None:
            return
        beginning, record = stopped
        num_stops = self._num_stops.pop(beginning, 0) + 1
        if num_stops == MAX_STOPS:  # the first text prefills it then
            self._count("left_out")
            return
        self._num_stops[beginning] = num_stops
        self._waiting[beginning] = record  # behind the others, which may be shorter

    def delete(self, audio_sha256: str) -> None:
        """It speaks by itself by now, or nobody has it any more."""
        if self._in_hand is not None and self._in_hand[0][0] == audio_sha256:
            self._stop()
        for known in (self._waiting, self._unspoken, self._num_stops):
            for beginning in [each for each in known if each[0] == audio_sha256]:
                del known[beginning]

    def delete_all(self) -> None:
        """As `delete`, of all."""
        self._stop()
        self._waiting.clear()
        self._unspoken.clear()
        self._num_stops.clear()

    def _stop(self) -> tuple[Beginning, SpeakerRecord] | None:
        """Take what is in hand out of the engine; returns whose it was."""
        if self._in_hand is None:
            return None
        beginning, record, task = self._in_hand
        if not task.cancel():  # it has just ended
            return None
        self._in_hand = None
        self._unspoken.pop(beginning, None)
        return beginning, record

    def shutdown(self) -> None:
        """Begin nothing more."""
        self._engine = None
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    def stats(self) -> dict[str, int] | None:
        """Counts since the start, and how many wait; None where none can."""
        if not self.is_possible:
            return None
        return {**asdict(self._counts), "waiting": len(self._waiting)}

    @property
    def is_possible(self) -> bool:
        """Whether anything is prefilled here."""
        return self._possible is not None

    @property
    def _possible(self) -> Prefill | None:
        engine = self._engine
        return engine if engine is not None and engine.is_possible else None

    async def _run(self, engine: Prefill) -> None:
        while self._waiting:
            await _until_idle(engine)
            if not engine.is_possible:  # as the last one has shown
                self._waiting.clear()
            if self._waiting:  # all may be deleted by now
                await self._prefill(engine, *self._waiting.popitem(last=False))

    async def _prefill(
        self, engine: Prefill, beginning: Beginning, record: SpeakerRecord
    ) -> None:
        self._unspoken[beginning] = time.monotonic()
        task = asyncio.create_task(engine.prefill(record))
        self._in_hand = beginning, record, task
        # No `wait_for`: it would begin to end the prefill only some steps later.
        clock = asyncio.get_running_loop().call_later(PREFILL_SECONDS, task.cancel)
        [error] = await asyncio.gather(task, return_exceptions=True)
        clock.cancel()
        if self._in_hand is None:  # it was stopped
            return
        self._in_hand = None
        self._num_stops.pop(beginning, None)
        if error is None:
            self._count("warmed")
            return
        self._unspoken.pop(beginning, None)
        # The first text prefills it then, unless there is nobody who could speak one.
        if engine.is_possible and not isinstance(error, SpeakerNotFoundError):
            self._count("failed")
        logger.debug("A voice was not prefilled: %r", error)

    def _delete_waiting(self, record: SpeakerRecord, *, but: Beginning) -> None:
        """Of a voice that was changed only what it is now is prefilled."""
        whose = record.tenant, record.name
        for beginning, other in list(self._waiting.items()):
            if (other.tenant, other.name) == whose and beginning != but:
                del self._waiting[beginning]
                self._num_stops.pop(beginning, None)

    def _num_unspoken(self) -> int:
        oldest = time.monotonic() - UNSPOKEN_SECONDS
        while self._unspoken and next(iter(self._unspoken.values())) < oldest:
            self._unspoken.popitem(last=False)
        return len(self._unspoken)

    def _count(self, outcome: str) -> None:
        setattr(self._counts, outcome, getattr(self._counts, outcome) + 1)
        process_metrics().kv_warmings.labels(outcome).inc()


async def _until_idle(engine: Prefill) -> None:
    num_idle = 0
    while num_idle < 2:
        await asyncio.sleep(LOOK_SECONDS)
        num_idle = num_idle + 1 if engine.is_idle else 0
