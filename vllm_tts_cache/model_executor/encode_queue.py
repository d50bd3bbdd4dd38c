"""Encodes reference audio on one background thread of a worker, beside decoding."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from cachetools import LRUCache

from vllm_tts_cache.catalogue.records import Segment
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.model_executor.encode_line import (
    EncodeClock,
    EncodeJob,
    Report,
    ThreadCall,
    WaitingLine,
)
from vllm_tts_cache.speaker.wire import JobState
from vllm_tts_cache.store.encoding import Encoding, EncodingKey

# Another process that has the key finishes, or dies and its lock with it. After this
# long it is stuck, and encoding twice is harmless.
MAX_ASIDE_SECONDS = 120.0
_PAUSE_AFTER_FAULT_SECONDS = 1.0
_CLOSE_SECONDS = 60.0  # a job of the slowest encoder on the longest audio
MAX_FAILURES = 1024  # that are remembered for whoever asks how far an encoding is
_READY = Report(JobState.READY)

T = TypeVar("T")
Turn = AbstractContextManager[object]


class MissingAudioError(EncodeError):
    """The reference audio of a job is not stored (any more)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """What waits, by segment as well, and what was counted since the start.

    Attributes:
        dropped: Jobs that nobody waited for any more.
        refused: Jobs that were one too many.
    """

    in_flight: int
    waiting: dict[str, int]
    dropped: int
    refused: int


@dataclass(slots=True)
class _Client:
    """What one client wants.

    Attributes:
        until: When its lease runs out, on the queue's clock.
        jobs: Of the wants that have not ended.
        ended: How the others ended, until the client withdraws them.
    """

    until: float = 0.0
    jobs: dict[int, EncodeJob] = field(default_factory=dict)
    ended: dict[int, Report] = field(default_factory=dict)


class EncodeWork(Protocol):
    """What the thread does for a job; only it calls these."""

    def is_done(self, job: EncodeJob) -> bool:
        """Tell whether the encoding exists, so that nothing need be encoded."""
        ...

    def take_turn(self, job: EncodeJob) -> Turn | None:
        """Take the key's turn among processes; None if another one has it."""
        ...

    def encode(self, job: EncodeJob) -> Encoding:
        """Make the encoding. Raises: MissingAudioError, EncodeError, anything."""
        ...

    def keep(self, job: EncodeJob, encoding: Encoding) -> None:
        """Store the encoding, unless its audio was deleted meanwhile."""
        ...


class EncodeQueue:
    """Runs ``work`` for each job, one after another, on a thread of its own.

    The thread starts with the first job, or with what is done on it while the model is
    loaded. Jobs arrive by RPC, that is, when the engine serves; a model that captures
    graphs then does so beside them, see `encode_device`. Every method that an RPC calls
    returns at once: the lock is never held over an encode or a file.

    Args:
        work: What is done for a job.
        max_waiting_inline: Inline jobs that may wait; further ones are refused.
        look_again_seconds: After which a job is looked at again that another process
            has in hand.
        clock: Monotonic seconds; leases run on it.
    """

    def __init__(
        self,
        work: EncodeWork,
        *,
        max_waiting_inline: int,
        look_again_seconds: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._work = work
        self._look_again_seconds = look_again_seconds
        self._clock = clock
        self._line = WaitingLine(max_waiting_inline)
        self._running: EncodeJob | None = None
        self._clients: dict[str, _Client] = {}
        self._failures = LRUCache[EncodingKey, Report](MAX_FAILURES)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._calls: deque[ThreadCall] = deque()
        self._pause_reason: str | None = None
        self._is_closed = False
        self._warnings = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))
        self._num_finished = 0
        self._num_refused = 0
        self._num_dropped = 0
        self.times = EncodeClock()

    def want(
        self,
        client_id: str,
        new: Mapping[int, EncodeJob | Report],
        withdrawn: Sequence[int],
        lease_seconds: float,
    ) -> tuple[bool, dict[int, Report]]:
        """Queue a client's new wants, give up others, and tell which have ended.

        A want that ends is told in each answer until it is withdrawn, so no answer that
        is lost loses it. While the queue pauses, what a request waits for fails.

        Args:
            client_id: Whose wants these are.
            new: By id the job of a want, or how the want ends at once.
            withdrawn: Ids of wants whose end is known, or that nobody waits for.
            lease_seconds: After which the client's wants are given up.

        Returns: Whether the client was known, and reports by the wants' ids: of those
            that have ended, and of those that are being encoded.
        """
        with self._changed:
            now = self._clock()
            is_known = client_id in self._clients
            client = self._clients.setdefault(client_id, _Client())
            client.until = now + lease_seconds
            for number in withdrawn:
                client.ended.pop(number, None)
                self._withdraw(client_id, client, number)
            for number, job in new.items():
                if number in client.ended:  # the answer that told so was lost
                    continue
                if isinstance(job, Report):
                    client.ended[number] = job
                    continue
                job.wanted_by.add((client_id, number))
                job.queued_at = now
                joined = self._joined(job)
                if isinstance(joined, EncodeJob):
                    client.jobs[number] = joined
                if job.is_in_memory:
                    client.ended[number] = _READY
                elif isinstance(joined, Report):
                    client.ended[number] = joined
            if len(self._line):
                self._start_thread()
                self._changed.notify_all()
            return is_known, self._in_hand(client_id) | client.ended

    def look(self, key: EncodingKey) -> Report:
        """Tell how far the key is, without wanting it."""
        with self._changed:
            if self._running is not None and self._running.key == key:
                return self._encoding_report(self._running)
            if self._line.get(key) is not None:
                return Report(JobState.QUEUED)
            return self._failures.get(key, Report(JobState.MISSING))

    def delete(self, audio_sha256s: Collection[str]) -> list[str]:
        """Delete the jobs of these audios; returns those being encoded right now."""
        with self._changed:
            for sha in audio_sha256s:
                for job in self._line.of_audio(sha):
                    self._line.remove(job)
                    self._end(job, Report(JobState.NO_AUDIO, "it was deleted"))
            for key in [k for k in self._failures if k.audio_sha256 in audio_sha256s]:
                del self._failures[key]
            running = self._running
            if running is None or running.key.audio_sha256 not in audio_sha256s:
                return []
            return [running.key.audio_sha256]

    def audios(self) -> set[str]:
        """Those of which something waits, is in hand, or is remembered as failed."""
        with self._changed:
            known = self._line.audios() | {key.audio_sha256 for key in self._failures}
            running = self._running
            return known if running is None else known | {running.key.audio_sha256}

    def call(self, act: Callable[[], T], timeout_seconds: float | None = None) -> T:
        """Run something on the thread, before the jobs that wait; return its result.

        For whoever loads the model: an RPC must not wait so long.

        Raises:
            TimeoutError: It goes on.
            EncodeError: The thread is closed.
            Exception: What it raises itself.
        """
        call = ThreadCall(act)
        with self._changed:
            if self._is_closed:
                call.give_up()
            else:
                self._calls.append(call)
                self._start_thread()
                self._changed.notify_all()
        try:
            result: T = call.done.result(timeout_seconds)
        except futures.TimeoutError as exc:
            if call.done.done():  # its own
                raise
            raise TimeoutError(f"not done within {timeout_seconds:g} s") from exc
        return result

    def pause(self, reason: str, timeout_seconds: float) -> bool:
        """Begin no job until `resume`; urgent ones that come fail for this reason.

        Returns: Whether the job in hand ended in time.
        """
        with self._changed:
            self._pause_reason = reason
            return self._changed.wait_for(
                lambda: self._running is None, timeout_seconds
            )

    def resume(self) -> None:
        """Go on with what still waits."""
        with self._changed:
            self._pause_reason = None
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread after the job in hand; what waits is dropped."""
        with self._changed:
            self._is_closed = True
            for call in self._calls:
                call.give_up()
            self._calls.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    @property
    def num_finished(self) -> int:
        """Jobs that ended, well or not, since the start; it never falls."""
        return self._num_finished

    def stats(self) -> QueueStats:
        """Return what waits, and what was counted since the start."""
        with self._changed:
            waiting = {s.value: self._line.num_waiting(s) for s in Segment}
            return QueueStats(
                in_flight=len(self._line) + (self._running is not None),
                waiting=waiting,
                dropped=self._num_dropped,
                refused=self._num_refused,
            )

    def _joined(self, job: EncodeJob) -> EncodeJob | Report:
        """Return the job that does a want: in hand, or in the line; else the reason."""
        running = self._running
        # A job in hand may end without the encode that another one forces.
        if (
            running is not None
            and running.key == job.key
            and running.is_forced >= job.is_forced
        ):
            running.join(job)
            return running
        if self._pause_reason is not None and job.is_urgent:
            return Report(JobState.FAILED, self._pause_reason)
        if (waiting := self._line.add(job)) is None:
            self._drop_expired(self._clock())  # those that left make room
            waiting = self._line.add(job)
        if waiting is None:
            self._num_refused += 1
            return Report(JobState.REFUSED)
        return waiting

    def _drop_expired(self, now: float) -> None:
        expired = [name for name, client in self._clients.items() if client.until < now]
        for client_id in expired:
            client = self._clients.pop(client_id)
            for number in list(client.jobs):
                self._withdraw(client_id, client, number)

    def _withdraw(self, client_id: str, client: _Client, number: int) -> None:
        """Give up a want, and its job if nobody else wants that."""
        if (job := client.jobs.pop(number, None)) is None:
            return
        job.wanted_by.discard((client_id, number))
        if not job.wanted_by and job is not self._running:
            self._line.remove(job)
            self._num_dropped += 1

    def _in_hand(self, client_id: str) -> dict[int, Report]:
        if (running := self._running) is None:
            return {}
        report = self._encoding_report(running)
        return {n: report for name, n in running.wanted_by if name == client_id}

    def _end(self, job: EncodeJob, report: Report) -> None:
        """Tell the clients that want a job how it ended."""
        for client_id, number in job.wanted_by:
            client = self._clients.get(client_id)
            if client is not None and client.jobs.pop(number, None) is not None:
                client.ended[number] = report

    def _encoding_report(self, job: EncodeJob) -> Report:
        began_at = self._clock() if job.began_at is None else job.began_at
        return Report(JobState.ENCODING, encoding_seconds=self._clock() - began_at)

    # -------- on the thread

    def _start_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._running = None
            self._thread = threading.Thread(
                target=self._run, name="tts-cache-encode", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._step()
            except Exception as exc:  # noqa: BLE001  the queue must not stop for it
                message = "The encode thread goes on after %r"
                self._warnings.warn_of("its thread", message, exc, mistake=exc)
                time.sleep(_PAUSE_AFTER_FAULT_SECONDS)

    def _step(self) -> None:
        """Wait for a job that may begin, and do what is to be done for it."""
        if isinstance(job := self._next(), ThreadCall):
            job.run()
            return
        if job is None:
            return
        report: Report | None = Report(JobState.FAILED, "the encode thread ended")
        try:
            report = self._result(job)
        except Exception as exc:  # noqa: BLE001  the thread must outlive any one clip
            report = self._failure(job, exc)
        finally:
            self._land(job, report)

    def _next(self) -> EncodeJob | ThreadCall | None:
        with self._changed:
            while not self._is_closed:
                if self._calls:
                    return self._calls.popleft()
                if self._pause_reason is not None:
                    self._changed.wait()
                    continue
                now = self._clock()
                self._drop_expired(now)
                if (job := self._line.pop(now)) is not None:
                    job.began_at = now
                    self._running = job
                    return job
                self._changed.wait(self._line.seconds_until_next(now))
        return None

    def _result(self, job: EncodeJob) -> Report | None:
        """Do the job; returns None if another process is at it."""
        if self._work.is_done(job):
            return _READY
        if (turn := self._turn(job)) is None:
            return None
        with turn:
            # Another process may have finished since the first look.
            if not self._work.is_done(job):
                self._work.keep(job, self._timed_encode(job))
        return _READY

    def _timed_encode(self, job: EncodeJob) -> Encoding:
        began_at = self._clock()
        encoding = self._work.encode(job)
        self.times.add(
            job.encoder_name,
            job.segment,
            encode_seconds=self._clock() - began_at,
            queue_seconds=began_at - job.queued_at,
        )
        return encoding

    def _turn(self, job: EncodeJob) -> Turn | None:
        turn = self._work.take_turn(job)
        since = job.aside_since
        if turn is None and since is not None:
            is_stuck = self._clock() - since > MAX_ASIDE_SECONDS
            return nullcontext() if is_stuck else None
        return turn

    def _land(self, job: EncodeJob, report: Report | None) -> None:
        with self._changed:
            self._running = None
            self._changed.notify_all()
            if report is None:
                self._put_aside(job)
                return
            self._num_finished += 1
            self._end(job, report)
            if report.state is JobState.READY:
                self._failures.pop(job.key, None)
            else:
                self._failures[job.key] = report

    def _failure(self, job: EncodeJob, exc: Exception) -> Report:
        reason = str(exc) or repr(exc)
        self._warnings.warn_of(
            f"encoding: {type(exc).__name__}",
            "Encoding %s of %s: %s",
            job.encoder_name,
            job.key.audio_sha256,
            reason,
        )
        is_missing = isinstance(exc, MissingAudioError)
        if not is_missing:
            self.times.fail(job.encoder_name)
        return Report(JobState.NO_AUDIO if is_missing else JobState.FAILED, reason)

    def _put_aside(self, job: EncodeJob) -> None:
        now = self._clock()
        job.began_at = None
        job.not_before = now + self._look_again_seconds
        job.aside_since = now if job.aside_since is None else job.aside_since
        if (waiting := self._line.get(job.key)) is not None:  # forced meanwhile
            self._line.remove(waiting)
            for client_id, number in waiting.wanted_by:
                self._clients[client_id].jobs[number] = job
            job.join(waiting)
        if job.wanted_by:
            self._line.put_aside(job)
        else:
            self._num_dropped += 1
