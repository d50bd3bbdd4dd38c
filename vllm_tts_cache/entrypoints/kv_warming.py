"""Has the engine prefill what a voice's prompts begin with, before anybody speaks."""

import asyncio
import logging
import time
from asyncio import Task
from collections import OrderedDict
from collections.abc import Callable
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


@dataclass(slots=True, eq=False)
class _Voice:
    """One that is to be prefilled, or was.

    Attributes:
        num_stops: How often requests have ended its prefill.
        began_at: When that began the last time, in monotonic seconds.
    """

    record: SpeakerRecord
    num_stops: int = 0
    began_at: float = 0.0

    @property
    def beginning(self) -> tuple[str | None, str | None]:
        """What its prompts begin with is made of."""
        return self.record.audio_sha256, self.record.ref_text


_Which = Callable[[_Voice], bool]


class KVWarming:
    """Voices one after another, while the engine has nothing to do; on its event loop.

    Args:
        engine: Does it; None where none can.
        is_on: Whether the operator wants it.
    """

    def __init__(self, engine: Prefill | None, *, is_on: bool):
        self._engine = engine if is_on else None
        # By their ids; the one in hand is among the unspoken.
        self._waiting: OrderedDict[str, _Voice] = OrderedDict()
        self._unspoken: OrderedDict[str, _Voice] = OrderedDict()
        self._counts = WarmingCounts()
        self._task: Task[None] | None = None
        self._in_hand: tuple[_Voice, Task[None]] | None = None

    def add(self, record: SpeakerRecord) -> bool:
        """Take a voice whose encodings exist; it is prefilled soon, or left out.

        Returns: Whether it waits, or is in hand.
        """
        if record.audio_sha256 is None or (engine := self._possible) is None:
            return False
        if not engine.helps(record):
            return False
        voice, id_ = _Voice(record), record.speaker_id
        for known in (self._waiting.get(id_), self._voice_in_hand):
            if known is not None and _is_same(known, voice):
                return True
        self._forget_old()
        if self._is_warm(voice):
            return False
        # Of one that was changed only what it is now is prefilled.
        self._delete(lambda known: known.record.speaker_id == id_)
        if self.is_full:
            self._count("left_out")
            return False
        self._waiting[id_] = voice
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(engine))
        return True

    @property
    def is_full(self) -> bool:
        """Whether one more would be left out: of one clip and transcript one counts."""
        known = (*self._unspoken.values(), *self._waiting.values())
        num_beginnings = len({voice.beginning for voice in known})
        return num_beginnings >= MAX_UNSPOKEN or len(known) >= 4 * MAX_UNSPOKEN

    def give_way(self) -> None:
        """A request begins: whose prefill is in hand, that voice waits again."""
        if (voice := self._stop()) is None:
            return
        voice.num_stops += 1
        if voice.num_stops == MAX_STOPS:  # the first text prefills it then
            self._count("left_out")
        else:  # behind the others, which may be shorter
            self._waiting[voice.record.speaker_id] = voice

    def delete(self, audio_sha256: str) -> None:
        """It speaks by itself by now, or nobody has it any more."""
        self._delete(lambda known: known.record.audio_sha256 == audio_sha256)

    def delete_all(self) -> None:
        """As `delete`, of all."""
        self._delete(lambda _: True)

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

    @property
    def _voice_in_hand(self) -> _Voice | None:
        return None if self._in_hand is None else self._in_hand[0]

    async def _run(self, engine: Prefill) -> None:
        while self._waiting:
            await _until_idle(engine)
            if not engine.is_possible:  # as the last one has shown
                self._waiting.clear()
            if self._waiting:  # all may be deleted by now
                _, voice = self._waiting.popitem(last=False)
                # Else another one of the same clip and transcript was before it.
                if not self._is_warm(voice):
                    await self._prefill(engine, voice)

    async def _prefill(self, engine: Prefill, voice: _Voice) -> None:
        id_, voice.began_at = voice.record.speaker_id, time.monotonic()
        self._unspoken[id_] = voice
        task = asyncio.create_task(engine.prefill(voice.record))
        self._in_hand = voice, task
        # No `wait_for`: it would begin to end the prefill only some steps later.
        clock = asyncio.get_running_loop().call_later(PREFILL_SECONDS, task.cancel)
        [error] = await asyncio.gather(task, return_exceptions=True)
        clock.cancel()
        if self._in_hand is None:  # it was stopped
            return
        self._in_hand = None
        if error is None:
            self._count("warmed")
            return
        self._unspoken.pop(id_, None)
        # The first text prefills it then, unless nobody can speak one.
        if engine.is_possible and not isinstance(error, SpeakerNotFoundError):
            self._count("failed")
        logger.debug("A voice was not prefilled: %r", error)

    def _stop(self) -> _Voice | None:
        """Take what is in hand out of the engine; returns whose it was."""
        if self._in_hand is None:
            return None
        voice, task = self._in_hand
        if not task.cancel():  # it has just ended
            return None
        self._in_hand = None
        self._unspoken.pop(voice.record.speaker_id, None)
        return voice

    def _delete(self, which: _Which) -> None:
        if self._in_hand is not None and which(self._in_hand[0]):
            self._stop()
        for known in (self._waiting, self._unspoken):
            for id_ in [id_ for id_, voice in known.items() if which(voice)]:
                del known[id_]

    def _is_warm(self, voice: _Voice) -> bool:
        """Whether one of the same clip and transcript was prefilled."""
        in_hand = self._voice_in_hand
        known = (each for each in self._unspoken.values() if each is not in_hand)
        return any(each.beginning == voice.beginning for each in known)

    def _forget_old(self) -> None:
        """Of those that nobody has spoken with for long it is not known any more."""
        oldest = time.monotonic() - UNSPOKEN_SECONDS
        for id_, voice in list(self._unspoken.items()):
            if voice.began_at < oldest:
                del self._unspoken[id_]

    def _count(self, outcome: str) -> None:
        setattr(self._counts, outcome, getattr(self._counts, outcome) + 1)
        process_metrics().kv_warmings.labels(outcome).inc()


def _is_same(one: _Voice, other: _Voice) -> bool:
    """Whether it is one voice, as it was."""
    ids = one.record.speaker_id, other.record.speaker_id
    return ids[0] == ids[1] and one.beginning == other.beginning


async def _until_idle(engine: Prefill) -> None:
    num_idle = 0
    while num_idle < 2:
        await asyncio.sleep(LOOK_SECONDS)
        num_idle = num_idle + 1 if engine.is_idle else 0
