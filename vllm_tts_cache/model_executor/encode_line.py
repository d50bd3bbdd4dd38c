"""The encode thread's jobs in the order of turns, and how long they took and waited."""

import threading
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.store.encoding import EncodingKey

# After so many urgent jobs, one that no request waits for has its turn.
MAX_URGENT_IN_A_ROW = 8

Flow = tuple[str, Segment]  # a tenant, and the segment of its jobs


@dataclass(slots=True, kw_only=True, eq=False)
class EncodeJob:
    """One encode of one audio, for all clients that want it.

    Attributes:
        flows: Those that it waits in; it is encoded in the first turn of any.
        segment: Whose budget the encoding counts against: that of registered voices if
            it waits for one.
        is_urgent: Whether a request waits for it, and not only a precompute.
        is_forced: Whether it is encoded although the encoding is stored.
        is_in_memory: Whether the encoding exists, and only its file is missing.
        wanted_by: The client's id and the want's id of each want.
        queued_at: When it was wanted first, on the queue's clock.
        began_at: When the encode thread took it.
        not_before: When to try again, if another process has the turn of its key.
        aside_since: When another process was first seen to have that turn.
        since: `MemoryTier.num_deletes` from before the audio, or encoding, was read.
    """

    key: EncodingKey
    encoder_name: str
    flows: set[Flow]
    segment: Segment
    is_urgent: bool = False
    is_forced: bool = False
    is_in_memory: bool = False
    wanted_by: set[tuple[str, int]] = field(default_factory=set)
    queued_at: float = 0.0
    began_at: float = 0.0
    not_before: float = 0.0
    aside_since: float | None = None
    since: int = 0

    def join(self, other: "EncodeJob") -> None:
        """Add the wants of another job with the same key."""
        self.flows |= other.flows
        if other.segment is Segment.REGISTERED:
            self.segment = other.segment
        self.is_urgent |= other.is_urgent
        self.is_forced |= other.is_forced
        self.wanted_by |= other.wanted_by


@dataclass(slots=True, eq=False)
class ThreadCall:
    """A function for the encode thread to call, whose result its caller waits for."""

    act: Callable[[], Any]
    done: "futures.Future[Any]" = field(default_factory=futures.Future)

    def run(self) -> None:
        """Call the function, and give its result or error to the caller."""
        try:
            self.done.set_result(self.act())
        except BaseException as exc:  # noqa: BLE001  the caller gets it
            is_error = isinstance(exc, Exception)
            self.done.set_exception(exc if is_error else EncodeError(repr(exc)))

    def give_up(self) -> None:
        """Raise an EncodeError in the caller, and do not call the function."""
        self.done.set_exception(EncodeError("the encode thread is closed"))


class WaitingLine:
    """Jobs that wait, one a key, in the order of turns. Not thread-safe.

    Tenants take turns, and within a tenant its registered voices and inline clips do:
    many of either hold up the other, and another tenant, by one job. With more jobs
    `audios` takes longer, and with more inline ones, which are bounded, their `add`.

    Args:
        max_inline: Inline audios that may wait at a time, each for all its jobs.

    Attributes:
        jobs: Those that wait, by key; changed by this class only.
    """

    def __init__(self, max_inline: int):
        self._max_inline = max_inline
        self.jobs: dict[EncodingKey, EncodeJob] = {}
        self._of_audio = defaultdict[str, set[EncodingKey]](set)
        self._inline = set[EncodingKey]()
        self._aside: dict[EncodingKey, EncodeJob] = {}
        # Urgent ones and others: flows in the order of their turns, jobs as they came.
        self._lanes: dict[bool, OrderedDict[Flow, dict[EncodingKey, EncodeJob]]] = {
            True: OrderedDict(),
            False: OrderedDict(),
        }
        self._num_urgent_in_a_row = 0

    def num_waiting(self) -> dict[Segment, int]:
        """Return how many jobs wait, by segment."""
        num_inline = len(self._inline)
        num_registered = len(self.jobs) - num_inline
        return {Segment.REGISTERED: num_registered, Segment.INLINE: num_inline}

    def of_audio(self, audio_sha256: str) -> list[EncodeJob]:
        """Return the jobs of an audio that wait."""
        return [self.jobs[key] for key in self._of_audio.get(audio_sha256, ())]

    def audios(self) -> set[str]:
        """Return the audios of all jobs that wait; takes longer with more of them."""
        return set(self._of_audio)

    def add(self, job: EncodeJob) -> EncodeJob | None:
        """Put a job behind those of its flow, or join the one of its key.

        Returns: The job that waits; None if as many inline audios wait as may.
        """
        key, is_aside = job.key, job.key in self._aside
        if (waiting := self.jobs.get(key)) is None:
            if job.segment is Segment.INLINE and not is_aside:
                inline = (each.audio_sha256 for each in self._inline)
                if len({key.audio_sha256, *inline}) > self._max_inline:
                    return None
            waiting = job
        else:
            if job.is_urgent and not waiting.is_urgent and not is_aside:
                self.remove(waiting)  # below it is added to the urgent lane
            waiting.join(job)
        self.jobs[key] = waiting
        self._of_audio[key.audio_sha256].add(key)
        if waiting.segment is Segment.INLINE:
            self._inline.add(key)
        else:
            self._inline.discard(key)
        if not is_aside:
            for flow in waiting.flows:
                self._lanes[waiting.is_urgent].setdefault(flow, {})[key] = waiting
        return waiting

    def put_aside(self, job: EncodeJob) -> None:
        """Have a job that was popped wait until its ``not_before``."""
        self._aside[job.key] = job
        self.add(job)

    def pop(self, now: float, *, only_urgent: bool = False) -> EncodeJob | float | None:
        """Take the next job that may begin.

        Args:
            now: On the queue's clock.
            only_urgent: Whether it must be one that a request waits for.

        Returns: If there is none, the seconds until one that was put aside may begin;
            None if none was.
        """
        for job in self._aside.values():  # as many as other processes encode now
            if job.not_before <= now and job.is_urgent >= only_urgent:
                self.remove(job)
                return job
        are_due = self._num_urgent_in_a_row < MAX_URGENT_IN_A_ROW
        for is_urgent in (True,) if only_urgent else (are_due, not are_due):
            if lane := self._lanes[is_urgent]:
                in_a_row = self._num_urgent_in_a_row + 1
                self._num_urgent_in_a_row = in_a_row if is_urgent else 0
                tenant, segment = turn = next(iter(lane))
                job = next(iter(lane[turn].values()))
                # The next turn is another tenant's, or the other flow's.
                others = [(tenant, other) for other in Segment if other is not segment]
                for flow in filter(lane.__contains__, [*others, turn]):
                    lane.move_to_end(flow)
                self.remove(job)
                return job
        waits = [job.not_before - now for job in self._aside.values()]
        return max(0.0, min(waits)) if waits else None

    def remove(self, job: EncodeJob) -> None:
        """Remove a job that waits."""
        key, of_audio = job.key, self._of_audio[job.key.audio_sha256]
        del self.jobs[key]
        of_audio.remove(key)
        if not of_audio:
            del self._of_audio[key.audio_sha256]
        self._inline.discard(key)
        if self._aside.pop(key, None) is None:
            lane = self._lanes[job.is_urgent]
            for flow in job.flows:
                del lane[flow][key]
                if not lane[flow]:
                    del lane[flow]


@dataclass(frozen=True, slots=True)
class Report:
    """How far the encoding of a key is."""

    state: wire.JobState
    reason: str = ""
    encoding_seconds: float = 0.0


class EncodeClock:
    """Counts encodes by encoder and segment since the start; any thread may ask.

    Attributes:
        num_failed: Failed encodes, by encoder.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By encoder, segment and what took so long; counts by the duration's class too.
        self._seconds = defaultdict[tuple[str, Segment, str], float](float)
        self._counts = Counter[tuple[str, Segment, str, int]]()
        self.num_failed = Counter[str]()

    def add(self, job: EncodeJob, encode_seconds: float, queue_seconds: float) -> None:
        """Count a successful encode, and how long its job waited before."""
        with self._lock:
            for what, seconds in ("encode", encode_seconds), ("queue", queue_seconds):
                of = job.encoder_name, job.segment, what
                # A bound counts what is as long as it.
                number = bisect_left(wire.DURATION_BOUNDS_SECONDS, seconds)
                self._counts[(*of, number)] += 1
                self._seconds[of] += seconds

    def times(self) -> list[wire.EncodeTimes]:
        """Return what was counted so far."""
        classes = range(len(wire.DURATION_BOUNDS_SECONDS) + 1)
        with self._lock:
            made = {
                of: wire.Durations([self._counts[(*of, n)] for n in classes], seconds)
                for of, seconds in self._seconds.items()
            }
        return [
            wire.EncodeTimes(
                encoder=encoder,
                segment=segment.value,
                encode=durations,
                queue=made[encoder, segment, "queue"],
            )
            for (encoder, segment, what), durations in made.items()
            if what == "encode"
        ]
