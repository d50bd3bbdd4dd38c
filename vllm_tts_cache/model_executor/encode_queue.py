"""Encodes reference audio on one background thread of a worker, beside decoding."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm_tts_cache import errors
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.model_executor.encode_line import (
    EncodeClock,
    EncodeJob,
    Report,
    ThreadCall,
    WaitingLine,
)
from vllm_tts_cache.model_executor.encode_work import StoredEncodeWork
from vllm_tts_cache.speaker.wire import JobState
from vllm_tts_cache.store.locks import Turns

# Another process that has a key's turn finishes, or dies and loses it. After this long
# it counts as stuck; encoding the key twice is harmless.
MAX_ASIDE_SECONDS = 120.0
_PAUSE_AFTER_FAULT_SECONDS = 1.0
_CLOSE_SECONDS = 60.0  # a job of the slowest encoder on the longest audio
_READY = Report(JobState.READY)

T = TypeVar("T")


@dataclass(slots=True)
class _Client:
    """What one client wants.

    Attributes:
        until: When its lease runs out, on the queue's clock.
        jobs: By id, of the wants that have not ended.
        ended: By id, how the others ended, until the client withdraws them.
    """

    until: float = 0.0
    jobs: dict[int, EncodeJob] = field(default_factory=dict)
    ended: dict[int, Report] = field(default_factory=dict)


class EncodeQueue:
    """Runs ``work`` for each job, one after another, on a thread of its own.

    The thread starts with the first job, or with the first `call` while the model is
    loaded. Jobs arrive by RPC, that is, when the engine serves; a model that captures
    graphs then does so beside them, see `encode_work`. Every method that an RPC calls
    returns at once: the lock is never held over an encode or a file.

    Args:
        work: Encodes, and stores encodings.
        turns: Keep two processes from encoding one key at a time.
        max_waiting_inline: Inline audios that may wait; further ones are refused.
        clock: Monotonic seconds; leases run on it.

    Attributes:
        times: How long encodes took and waited.
        num_finished: Jobs that ended, well or not, since the start; it never falls.
    """

    def __init__(
        self,
        work: StoredEncodeWork,
        turns: Turns,
        *,
        max_waiting_inline: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._work = work
        self._turns = turns
        self._clock = clock
        self._line = WaitingLine(max_waiting_inline)
        self._running: EncodeJob | None = None
        self._clients: dict[str, _Client] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._calls: deque[ThreadCall] = deque()
        self._pause_reason: str | None = None
        self._rests_until = 0.0
        self._is_closed = False
        self._warnings = ThrottledLog()
        self.num_finished = 0
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
        """Queue a client's new wants, withdraw others, and report which have ended.

        Each answer reports an ended want until the client withdraws it, so a lost
        answer loses no report. While the queue pauses, urgent wants fail.

        Args:
            client_id: Whose wants these are.
            new: By id the job of a want, or how the want ends at once.
            withdrawn: Ids of wants whose end is known, or that no request waits for.
            lease_seconds: After so long without a call the client's wants are removed.

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
                if number in client.jobs:
                    self._withdraw(client_id, client, number)
            for number, job in new.items():
                if number in client.ended:  # the answer that reported it was lost
                    continue
                if isinstance(job, Report):
                    client.ended[number] = job
                    continue
                job.wanted_by.add((client_id, number))
                job.queued_at = now
                joined = self._running_or_queued(job)
                if isinstance(joined, Report):
                    client.ended[number] = joined
                else:
                    client.jobs[number] = joined
                if job.is_in_memory and job.is_urgent:  # others wait until it is stored
                    client.ended[number] = _READY
            if client.jobs:
                self._start_thread()
                self._changed.notify_all()
            if (running := self._running) is None:
                return is_known, client.ended.copy()
            seconds = now - running.began_at
            report = Report(JobState.ENCODING, encoding_seconds=seconds)
            of_client = [n for name, n in running.wanted_by if name == client_id]
            return is_known, dict.fromkeys(of_client, report) | client.ended

    def delete(self, audio_sha256s: Collection[str]) -> list[str]:
        """Delete the jobs of these audios; return which audios are being encoded."""
        with self._changed:
            for sha in audio_sha256s:
                for job in self._line.of_audio(sha):
                    self._line.remove(job)
                    self._end(job, Report(JobState.NO_AUDIO, "it was deleted"))
            running = self._running
            if running is None or running.key.audio_sha256 not in audio_sha256s:
                return []
            return [running.key.audio_sha256]

    def audios(self) -> set[str]:
        """Return the audios of all jobs that wait or run."""
        with self._changed:
            known, running = self._line.audios(), self._running
            return known if running is None else known | {running.key.audio_sha256}

    def call(self, act: Callable[[], T], timeout_seconds: float | None = None) -> T:
        """Run something on the thread, before the jobs that wait; return its result.

        For code that loads the model: an RPC must not wait so long.

        Raises:
            TimeoutError: ``act`` still runs, or waits.
            EncodeError: The thread is closed.
            Exception: Whatever ``act`` raises.
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
        except TimeoutError as exc:
            if call.done.done():  # raised by ``act``
                raise
            message = f"the encode thread took longer than {timeout_seconds:g} s"
            raise TimeoutError(message) from exc
        return result

    def pause(self, reason: str, timeout_seconds: float) -> bool:
        """Begin no job until `resume`; new urgent wants fail for this reason.

        Returns: Whether the running job ended in time.
        """
        with self._changed:
            self._pause_reason = reason
            return self._changed.wait_for(
                lambda: self._running is None, timeout_seconds
            )

    def resume(self) -> None:
        """Begin jobs again, first those that still wait."""
        with self._changed:
            self._pause_reason = None
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread after the running job; waiting ones are dropped."""
        with self._changed:
            self._is_closed = True
            for call in self._calls:
                call.give_up()
            self._calls.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def stats(self) -> dict[str, Any]:
        """Return fields of `SpeakerStats`: what waits, and the counts."""
        with self._changed:
            waiting = self._line.num_waiting()
            return {
                "in_flight": sum(waiting.values()) + (self._running is not None),
                "waiting": {s.value: number for s, number in waiting.items()},
                "dropped": self._num_dropped,
                "refused": self._num_refused,
            }

    def _running_or_queued(self, job: EncodeJob) -> EncodeJob | Report:
        """Return the job for a want, which runs or waits; else why there is none."""
        running = self._running
        # A running job may end without the encode that the new one forces.
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
        """Remove a want, and its job if no other client wants that."""
        job = client.jobs.pop(number)
        job.wanted_by.discard((client_id, number))
        if not job.wanted_by and job is not self._running:
            self._line.remove(job)
            self._num_dropped += 1

    def _end(self, job: EncodeJob, report: Report) -> None:
        """Note, for the clients that want a job, how it ended."""
        for client_id, number in job.wanted_by:
            client = self._clients.get(client_id)
            if client is not None and client.jobs.pop(number, None) is not None:
                client.ended[number] = report

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
                message = "The encode thread goes on after an unexpected error: %r"
                self._warnings.warn_of("its thread", message, exc, mistake=exc)
                time.sleep(_PAUSE_AFTER_FAULT_SECONDS)

    def _step(self) -> None:
        """Wait for a call or a job that may begin, and do it."""
        if isinstance(job := self._next(), ThreadCall):
            job.run()
            return
        if job is None:
            return
        report: Report | None = Report(JobState.FAILED, "the encode thread ended")
        began_at = self._clock()
        try:
            report = self._result(job)
        except Exception as exc:  # noqa: BLE001  the thread must outlive any one clip
            report = self._failure(job, exc)
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()
                if report is None:
                    self._put_aside(job)
                else:
                    self.num_finished += 1
                    self._end(job, report)
        if not job.is_urgent:
            now = self._clock()
            self._rests_until = now + self._work.rest_seconds(now - began_at)

    def _next(self) -> EncodeJob | ThreadCall | None:
        with self._changed:
            while not self._is_closed:
                if self._calls:
                    return self._calls.popleft()
                if self._pause_reason is not None:
                    self._changed.wait()
                    continue
                now, found = self._clock(), None
                is_resting = now < self._rests_until
                if self._line.jobs:
                    self._drop_expired(now)
                    found = self._line.pop(now, only_urgent=is_resting)
                if isinstance(found, EncodeJob):
                    found.began_at = now
                    self._running = found
                    return found
                self._changed.wait(self._rests_until - now if is_resting else found)
        return None

    def _result(self, job: EncodeJob) -> Report | None:
        """Do the job; returns None if another process has its key's turn."""
        with self._turns.turn(job.key) as is_mine:
            since = job.aside_since
            is_stuck = since is not None and self._clock() - since > MAX_ASIDE_SECONDS
            if not (is_mine or is_stuck):
                return None
            if not self._work.is_done(job):
                began_at = self._clock()
                encoding = self._work.encode(job)
                encode_seconds = self._clock() - began_at
                queue_seconds = began_at - job.queued_at
                self.times.add(job, encode_seconds, queue_seconds)
                self._work.keep(job, encoding)
        return _READY

    def _failure(self, job: EncodeJob, exc: Exception) -> Report:
        reason = str(exc) or repr(exc)
        self._warnings.warn_of(
            f"encoding: {type(exc).__name__}",
            "Encoding audio %s by %s failed: %s",
            job.key.audio_sha256,
            job.encoder_name,
            errors.log_text_of(exc),
        )
        if isinstance(exc, errors.AudioGoneError):
            return Report(JobState.NO_AUDIO, reason)
        if isinstance(exc, errors.AWAY):
            return Report(JobState.AWAY, reason)
        self.times.num_failed[job.encoder_name] += 1
        if isinstance(exc, errors.EncodersChangedError):
            return Report(JobState.NO_ENCODER)
        self._work.note_failed(job, reason)
        return Report(JobState.FAILED, reason)

    def _put_aside(self, job: EncodeJob) -> None:
        now = self._clock()
        job.not_before = now + self._turns.look_again_seconds
        job.aside_since = now if job.aside_since is None else job.aside_since
        if (waiting := self._line.jobs.get(job.key)) is not None:  # forced meanwhile
            self._line.remove(waiting)
            for client_id, number in waiting.wanted_by:
                self._clients[client_id].jobs[number] = job
            job.join(waiting)
        if job.wanted_by:
            self._line.put_aside(job)
        else:
            self._num_dropped += 1
