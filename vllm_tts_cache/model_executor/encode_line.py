"""The encode thread's jobs: those that wait, and what became of those that ended.

And how long encodes took and waited, counted where they happen.
"""

import threading
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

from cachetools import LRUCache

from vllm_tts_cache.catalogue.records import Segment
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.speaker.reference import Lane
from vllm_tts_cache.speaker.wire import (
    DURATION_BOUNDS_SECONDS,
    Durations,
    EncodeTimes,
    JobState,
)
from vllm_tts_cache.store.encoding import EncodingKey

MAX_REMEMBERED = 1024  # failures; and as many finished force ids


@dataclass(slots=True, kw_only=True, eq=False)
class EncodeJob:
    """One encoder on one audio, for whoever wants it.

    Attributes:
        lane: Where it waits; those who join it can only bring it forward.
        wanted_until: When its last lease runs out, on the queue's clock.
        force_ids: Who wants it encoded although it is stored.
        queued_at: When it was wanted first, on the queue's clock.
        began_at: When the encode thread took it; None while it waits.
        not_before: When it may be looked at again, after another process had it.
        aside_since: When another process was first seen to have it.
    """

    key: EncodingKey
    encoder_name: str
    segment: Segment
    lane: Lane
    wanted_until: float
    force_ids: set[str] = field(default_factory=set)
    queued_at: float = 0.0
    began_at: float | None = None
    not_before: float = 0.0
    aside_since: float | None = None

    def join(self, other: "EncodeJob") -> None:
        """Take in what another caller wants of the same key."""
        if other.lane is not self.lane:
            # Whoever differs from the other: a request waits, and a voice has the clip.
            self.lane = Lane.URGENT
        if other.segment is Segment.REGISTERED:
            self.segment = Segment.REGISTERED
        self.wanted_until = max(self.wanted_until, other.wanted_until)
        self.force_ids |= other.force_ids


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
    """Jobs by lane, first come first served, one a key. Not thread-safe.

    Args:
        max_inline: Inline jobs that may wait at a time.
    """

    def __init__(self, max_inline: int):
        self._max_inline = max_inline
        self._lanes: dict[Lane, OrderedDict[EncodingKey, EncodeJob]] = {
            lane: OrderedDict() for lane in Lane
        }
        self._lanes_in_turn = (Lane.REGISTERED, Lane.INLINE)
        self.num_dropped = 0

    def __len__(self) -> int:
        """Jobs that wait."""
        return sum(map(len, self._lanes.values()))

    def num_waiting(self, segment: Segment) -> int:
        """Jobs that wait in the segment's lanes."""
        num_inline = len(self._lanes[Lane.INLINE])
        return num_inline if segment is Segment.INLINE else len(self) - num_inline

    def get(self, key: EncodingKey) -> EncodeJob | None:
        """Return the key's job, if it waits."""
        for lane in self._lanes.values():
            if (job := lane.get(key)) is not None:
                return job
        return None

    def add(self, job: EncodeJob, now: float) -> bool:
        """Put a job at the end of its lane, or join the one of its key.

        Returns: False if as many inline jobs wait as may.
        """
        if (waiting := self.get(job.key)) is not None:
            self._join(waiting, job)
            return True
        if job.lane is Lane.INLINE and self._is_full(now):
            return False
        self._lanes[job.lane][job.key] = job
        return True

    def put_back(self, job: EncodeJob) -> None:
        """Put a job that was popped at the front of its lane."""
        if (waiting := self.get(job.key)) is not None:  # wanted anew meanwhile
            self._join(waiting, job)
            return
        lane = self._lanes[job.lane]
        lane[job.key] = job
        lane.move_to_end(job.key, last=False)

    def pop(self, now: float) -> EncodeJob | None:
        """Take the next job that may begin; drop those that nobody wants any more.

        Args:
            now: On the queue's clock.
        """
        self._drop_unwanted(now)
        for lane in (Lane.URGENT, *self._lanes_in_turn):
            for job in self._lanes[lane].values():
                if job.not_before <= now:
                    del self._lanes[lane][job.key]
                    if lane is self._lanes_in_turn[0]:
                        self._lanes_in_turn = self._lanes_in_turn[::-1]
                    return job
        return None

    def seconds_until_next(self, now: float) -> float | None:
        """Seconds until `pop` may find what it does not find now; None if no job."""
        if not len(self):
            return None
        return max(0.0, min(job.not_before for job in self._jobs()) - now)

    def audios(self) -> set[str]:
        """The audios of jobs that wait."""
        return {job.key.audio_sha256 for job in self._jobs()}

    def remove(self, audio_sha256s: Collection[str]) -> None:
        """Remove the jobs of these audios."""
        for job in list(self._jobs()):
            if job.key.audio_sha256 in audio_sha256s:
                del self._lanes[job.lane][job.key]

    def _join(self, waiting: EncodeJob, job: EncodeJob) -> None:
        was_in = waiting.lane
        waiting.join(job)
        if waiting.lane is not was_in:
            del self._lanes[was_in][job.key]
            self._lanes[waiting.lane][job.key] = waiting

    def _is_full(self, now: float) -> bool:
        if len(self._lanes[Lane.INLINE]) >= self._max_inline:
            self._drop_unwanted(now)
        return len(self._lanes[Lane.INLINE]) >= self._max_inline

    def _drop_unwanted(self, now: float) -> None:
        unwanted = [job for job in self._jobs() if job.wanted_until < now]
        for job in unwanted:
            del self._lanes[job.lane][job.key]
        self.num_dropped += len(unwanted)

    def _jobs(self) -> Iterator[EncodeJob]:
        for lane in self._lanes.values():
            yield from lane.values()


@dataclass(frozen=True, slots=True)
class Report:
    """How far a key is."""

    state: JobState
    reason: str = ""
    encoding_seconds: float = 0.0


@dataclass(slots=True)
class _Failure:
    report: Report
    told_until: float  # a want until then is told; one that comes later tries again


class Outcomes:
    """Remembers what the last jobs came to. Not thread-safe."""

    def __init__(self) -> None:
        self._failures = LRUCache[EncodingKey, _Failure](MAX_REMEMBERED)
        self._forced = LRUCache[tuple[EncodingKey, str], None](MAX_REMEMBERED)

    def add(self, job: EncodeJob, report: Report) -> None:
        """Remember how a job ended, as long as somebody may ask for it."""
        if report.state is JobState.READY:
            for force_id in job.force_ids:
                self._forced[job.key, force_id] = None
            return
        self._failures[job.key] = _Failure(report, job.wanted_until)

    def tell_failure(self, key: EncodingKey, now: float) -> Report | None:
        """Return the key's failure, once, while the lease of its job runs."""
        if (failure := self._failures.get(key)) is None:
            return None
        if now < failure.told_until:
            failure.told_until = 0.0
            return failure.report
        del self._failures[key]
        return None

    def failure(self, key: EncodingKey) -> Report | None:
        """Return the key's failure, told or not, to one who does not want it."""
        failure = self._failures.get(key)
        return None if failure is None else failure.report

    def has_forced(self, key: EncodingKey, force_id: str) -> bool:
        """Tell whether the key was encoded for this force id."""
        return (key, force_id) in self._forced

    def failed_audios(self) -> set[str]:
        """The audios of jobs that failed."""
        return {key.audio_sha256 for key in self._failures}

    def delete_failures(self, audio_sha256s: Collection[str]) -> None:
        """Delete the failures of these audios."""
        for key in [k for k in self._failures if k.audio_sha256 in audio_sha256s]:
            del self._failures[key]


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
