"""The encode thread's jobs in the order of turns, and how long they took and waited."""

import threading
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

from vllm_tts_cache.catalogue.records import Segment
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.speaker.wire import (
    DURATION_BOUNDS_SECONDS,
    Durations,
    EncodeTimes,
    JobState,
)
from vllm_tts_cache.store.encoding import EncodingKey

# After so many jobs that requests wait for, one that nobody waits for has its turn.
MAX_URGENT_IN_A_ROW = 8

Flow = tuple[str, Segment]  # a tenant, and what its jobs are of


@dataclass(slots=True, kw_only=True, eq=False)
class EncodeJob:
    """One encoder on one audio, for all clients that want it.

    Attributes:
        flows: For whom it waits; it is encoded in the turn of the first of them.
        is_urgent: Whether a request waits for it, and not only a precompute.
        is_forced: Whether it is encoded although the encoding is stored.
        is_in_memory: Whether the encoding exists, and only its file is missing.
        wanted_by: Of each want the id of its client and its own.
        queued_at: When it was wanted first, on the queue's clock.
        began_at: When the encode thread took it; None while it waits.
        not_before: When it may be looked at again, after another process had it.
        aside_since: When another process was first seen to have it.
    """

    key: EncodingKey
    encoder_name: str
    flows: set[Flow]
    is_urgent: bool = False
    is_forced: bool = False
    is_in_memory: bool = False
    wanted_by: set[tuple[str, int]] = field(default_factory=set)
    queued_at: float = 0.0
    began_at: float | None = None
    not_before: float = 0.0
    aside_since: float | None = None

    @property
    def segment(self) -> Segment:
        """Whose budget the encoding counts against."""
        is_voice = any(segment is Segment.REGISTERED for _, segment in self.flows)
        return Segment.REGISTERED if is_voice else Segment.INLINE

    def join(self, other: "EncodeJob") -> None:
        """Take in what another client wants of the same key."""
        self.flows |= other.flows
        self.is_urgent |= other.is_urgent
        self.is_forced |= other.is_forced
        self.wanted_by |= other.wanted_by


@dataclass(slots=True, eq=False)
class ThreadCall:
    """Something else that is done on the thread, and that somebody waits for."""

    act: Callable[[], Any]
    done: "futures.Future[Any]" = field(default_factory=futures.Future)

    def run(self) -> None:
        """Do it, and have whoever waits go on."""
        try:
            self.done.set_result(self.act())
        except BaseException as exc:  # noqa: BLE001  whoever waits gets it
            is_error = isinstance(exc, Exception)
            self.done.set_exception(exc if is_error else EncodeError(repr(exc)))

    def give_up(self) -> None:
        """Have whoever waits go on without it."""
        self.done.set_exception(EncodeError("the encode thread is closed"))


class WaitingLine:
    """Jobs that wait, one a key, in the order of turns. Not thread-safe.

    Tenants take turns, and within a tenant its registered voices and inline clips do:
    many of either hold up the other, and another tenant, by one job. Nothing takes
    longer with more jobs but what says so.

    Args:
        max_inline: Inline jobs that may wait at a time.
    """

    def __init__(self, max_inline: int):
        self._max_inline = max_inline
        self._jobs: dict[str, dict[str, EncodeJob]] = {}  # by audio and fingerprint
        self._aside: dict[EncodingKey, EncodeJob] = {}
        # Urgent ones and others: flows in the order of their turns, jobs as they came.
        self._lanes: dict[bool, OrderedDict[Flow, dict[EncodingKey, EncodeJob]]] = {
            True: OrderedDict(),
            False: OrderedDict(),
        }
        self._num_waiting = Counter[Segment]()
        self._num_urgent_in_a_row = 0

    def __len__(self) -> int:
        """Jobs that wait."""
        return self._num_waiting.total()

    def num_waiting(self, segment: Segment) -> int:
        """Jobs of the segment that wait."""
        return self._num_waiting[segment]

    def get(self, key: EncodingKey) -> EncodeJob | None:
        """Return the key's job, if it waits."""
        return self._jobs.get(key.audio_sha256, {}).get(key.encoder_fingerprint)

    def of_audio(self, audio_sha256: str) -> list[EncodeJob]:
        """Return the jobs of an audio that wait."""
        return list(self._jobs.get(audio_sha256, {}).values())

    def audios(self) -> set[str]:
        """The audios of all jobs that wait: takes longer with more of them."""
        return set(self._jobs)

    def add(self, job: EncodeJob) -> EncodeJob | None:
        """Put a job behind those of its flow, or join the one of its key.

        Returns: The job that waits; None if as many inline jobs wait as may.
        """
        if (waiting := self.get(job.key)) is None:
            is_inline = job.segment is Segment.INLINE
            if is_inline and self._num_waiting[Segment.INLINE] >= self._max_inline:
                return None
            self._keep(job)
            self._place(job)
            return job
        is_aside = job.key in self._aside
        if job.is_urgent and not waiting.is_urgent and not is_aside:
            self._take_out(waiting)
        self._num_waiting[waiting.segment] -= 1
        waiting.join(job)
        self._num_waiting[waiting.segment] += 1
        if not is_aside:
            self._place(waiting)
        return waiting

    def put_aside(self, job: EncodeJob) -> None:
        """Have a job that was popped wait until its ``not_before``."""
        self._keep(job)
        self._aside[job.key] = job

    def pop(self, now: float) -> EncodeJob | None:
        """Take the next job that may begin.

        Args:
            now: On the queue's clock.
        """
        for job in self._aside.values():  # as many as other processes have in hand
            if job.not_before <= now:
                self.remove(job)
                return job
        are_due = self._num_urgent_in_a_row < MAX_URGENT_IN_A_ROW
        for is_urgent in (are_due, not are_due):
            if lane := self._lanes[is_urgent]:
                in_a_row = self._num_urgent_in_a_row + 1
                self._num_urgent_in_a_row = in_a_row if is_urgent else 0
                job = _take_turn(lane)
                self.remove(job)
                return job
        return None

    def seconds_until_next(self, now: float) -> float | None:
        """Seconds until `pop` may find what it does not find now; None if no job."""
        waits = (job.not_before - now for job in self._aside.values())
        return max(0.0, min(waits)) if self._aside else None

    def remove(self, job: EncodeJob) -> None:
        """Remove a job that waits."""
        self._num_waiting[job.segment] -= 1
        of_audio = self._jobs[job.key.audio_sha256]
        del of_audio[job.key.encoder_fingerprint]
        if not of_audio:
            del self._jobs[job.key.audio_sha256]
        if self._aside.pop(job.key, None) is None:
            self._take_out(job)

    def _keep(self, job: EncodeJob) -> None:
        of_audio = self._jobs.setdefault(job.key.audio_sha256, {})
        of_audio[job.key.encoder_fingerprint] = job
        self._num_waiting[job.segment] += 1

    def _place(self, job: EncodeJob) -> None:
        """Put a job at the end of each flow that it is not in."""
        for flow in job.flows:
            self._lanes[job.is_urgent].setdefault(flow, {})[job.key] = job

    def _take_out(self, job: EncodeJob) -> None:
        lane = self._lanes[job.is_urgent]
        for flow in job.flows:
            del lane[flow][job.key]
            if not lane[flow]:
                del lane[flow]


def _take_turn(lane: OrderedDict[Flow, dict[EncodingKey, EncodeJob]]) -> EncodeJob:
    """Return the first job; the next turn is another tenant's, or the other flow's."""
    tenant, segment = turn = next(iter(lane))
    others = [(tenant, other) for other in Segment if other is not segment]
    for flow in filter(lane.__contains__, [*others, turn]):
        lane.move_to_end(flow)
    return next(iter(lane[turn].values()))


@dataclass(frozen=True, slots=True)
class Report:
    """How far a key is."""

    state: JobState
    reason: str = ""
    encoding_seconds: float = 0.0


@dataclass(slots=True)
class _Counted:
    counts: list[int] = field(
        default_factory=lambda: [0] * (len(DURATION_BOUNDS_SECONDS) + 1)
    )
    total_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        # A bound counts what is as long as it.
        self.counts[bisect_left(DURATION_BOUNDS_SECONDS, seconds)] += 1
        self.total_seconds += seconds

    def to_wire(self) -> Durations:
        return Durations(counts=list(self.counts), total_seconds=self.total_seconds)


class EncodeClock:
    """Counts encodes by encoder and segment since the start; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._encode: dict[tuple[str, Segment], _Counted] = {}
        self._queue: dict[tuple[str, Segment], _Counted] = {}
        self._num_failed: Counter[str] = Counter()

    def add(
        self,
        encoder: str,
        segment: Segment,
        *,
        encode_seconds: float,
        queue_seconds: float,
    ) -> None:
        """Count an encode that went well."""
        with self._lock:
            key = encoder, segment
            self._encode.setdefault(key, _Counted()).add(encode_seconds)
            self._queue.setdefault(key, _Counted()).add(queue_seconds)

    def fail(self, encoder: str) -> None:
        """Count one that did not."""
        with self._lock:
            self._num_failed[encoder] += 1

    def num_failed(self, encoder: str) -> int:
        """Return how many of an encoder's did not go well."""
        return self._num_failed[encoder]

    def times(self) -> list[EncodeTimes]:
        """Return what was counted so far."""
        with self._lock:
            return [
                EncodeTimes(
                    encoder=encoder,
                    segment=segment.value,
                    encode=counted.to_wire(),
                    queue=self._queue[encoder, segment].to_wire(),
                )
                for (encoder, segment), counted in self._encode.items()
            ]
