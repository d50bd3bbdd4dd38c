"""Encodes reference audio on one background thread of a worker, beside decoding."""

import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm_tts_cache import errors
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.model_executor.encode_work import EncodeJob, Flow, StoredEncodeWork
from vllm_tts_cache.speaker.wire import JobState, WantAnswer, WantCall, WantReport
from vllm_tts_cache.store.encoding import EncodingKey

# After so many urgent jobs, one that no request waits for has its turn.
MAX_URGENT_IN_A_ROW = 8
# Another process that has a key's turn finishes, or dies and loses it. After this long
# it counts as stuck; encoding the key twice is harmless.
MAX_ASIDE_SECONDS = 120.0
_PAUSE_AFTER_FAULT_SECONDS = 1.0
_CLOSE_SECONDS = 60.0  # a job of the slowest encoder on the longest audio

T = TypeVar("T")


class WaitingLine:
    """Jobs that wait, one a key, in the order of turns. Not thread-safe.

    Tenants take turns, and within a tenant its registered voices and inline clips do:
    many of either hold up the other, and another tenant, by one job. With more inline
    jobs, which are bounded, their `add` takes longer.

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
            self.done.set_exception(exc if is_error else errors.EncodeError(repr(exc)))


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
    ended: dict[int, WantReport] = field(default_factory=dict)


class EncodeQueue:
    """Runs ``work`` for each job, one after another, on a thread of its own.

    The thread starts with the first job, or with the first `call` while the model is
    loaded. Jobs arrive by RPC, that is, when the engine serves; a model that captures
    graphs then does so beside them, see `encode_work`. Every method that an RPC calls
    returns at once: the lock is never held over an encode or a file.

    Args:
        work: Encodes, and stores encodings.
        max_waiting_inline: Inline audios that may wait; further ones are refused.
        clock: Monotonic seconds; leases run on it.

    Attributes:
        num_finished: Jobs that ended, well or not, since the start; it never falls.
    """

    def __init__(
        self,
        work: StoredEncodeWork,
        *,
        max_waiting_inline: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._work = work
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

    def want(self, call: WantCall, rank: int) -> WantAnswer:
        """Queue a client's new wants, withdraw others, and report which have ended.

        Each answer reports an ended want until the client withdraws it, so a lost
        answer loses no report. While the queue pauses, urgent wants fail. Only rank 0
        encodes; the others load what it publishes.
        """
        num_finished = self.num_finished
        if rank:
            return WantAnswer(rank, True, [], num_finished)
        new = {want.id: self._work.job_of(want) for want in call.new}
        with self._changed:
            now, name = self._clock(), call.client_id
            is_known = name in self._clients
            client = self._clients.setdefault(name, _Client())
            client.until = now + call.lease_seconds
            for number in call.withdrawn:
                client.ended.pop(number, None)
                if number in client.jobs:
                    self._withdraw(name, client, number)
            for number, job in new.items():
                if number in client.ended:  # the answer that reported it was lost
                    continue
                if isinstance(job, WantReport):
                    client.ended[number] = job
                else:
                    job.queued_at = now
                    job.wanted_by.add((name, number))
                    self._join(client, number, job)
            if client.jobs:
                self._start_thread()
                self._changed.notify_all()
            reports = client.ended
            if (running := self._running) is not None:
                seconds = now - running.began_at
                encoding = {
                    number: WantReport(number, JobState.ENCODING, "", seconds)
                    for client_id, number in running.wanted_by
                    if client_id == name
                }
                reports = encoding | reports
            return WantAnswer(rank, is_known, list(reports.values()), num_finished)

    def delete(self, audio_sha256s: Collection[str] | None) -> list[str]:
        """Delete jobs of these audios, or of all; return which are being encoded."""
        with self._changed:
            if audio_sha256s is None:
                jobs = list(self._line.jobs.values())
            else:
                of_audio = self._line.of_audio
                jobs = [job for sha in audio_sha256s for job in of_audio(sha)]
            for job in jobs:
                self._line.remove(job)
                self._end(job, JobState.NO_AUDIO, "it was deleted")
            busy = [] if self._running is None else [self._running.key.audio_sha256]
            return [s for s in busy if audio_sha256s is None or s in audio_sha256s]

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
                call.done.set_exception(_closed())
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
                call.done.set_exception(_closed())
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

    def _join(self, client: _Client, number: int, job: EncodeJob) -> None:
        """Have a want wait for the job of its key that runs or waits, or end it."""
        running = self._running
        # A running job may end without the encode that the new one forces.
        if (
            running is not None
            and running.key == job.key
            and running.is_forced >= job.is_forced
        ):
            running.join(job)
            client.jobs[number] = running
        elif (reason := self._pause_reason) is not None and job.is_urgent:
            client.ended[number] = WantReport(number, JobState.FAILED, reason)
        else:
            if (waiting := self._line.add(job)) is None:
                self._drop_expired(self._clock())  # those that left make room
                waiting = self._line.add(job)
            if waiting is not None:
                client.jobs[number] = waiting
            else:
                self._num_refused += 1
                client.ended[number] = WantReport(number, JobState.REFUSED)
        if job.is_in_memory and job.is_urgent:  # others wait until it is stored
            client.ended[number] = WantReport(number, JobState.READY)

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

    def _end(self, job: EncodeJob, state: JobState, reason: str) -> None:
        """Note, for the clients that want a job, how it ended."""
        for client_id, number in job.wanted_by:
            client = self._clients.get(client_id)
            if client is not None and client.jobs.pop(number, None) is not None:
                client.ended[number] = WantReport(number, state, reason)

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
                work = self._next()
                if isinstance(work, EncodeJob):
                    self._do(work)
                elif work is not None:
                    work.run()
            except Exception as exc:  # noqa: BLE001  the queue must not stop for it
                message = "The encode thread goes on after an unexpected error: %r"
                self._warnings.warn_of("its thread", message, exc, mistake=exc)
                time.sleep(_PAUSE_AFTER_FAULT_SECONDS)

    def _do(self, job: EncodeJob) -> None:
        ended: tuple[JobState, str] | None = JobState.FAILED, "the encode thread ended"
        began_at, since = self._clock(), job.aside_since
        is_stuck = since is not None and began_at - since > MAX_ASIDE_SECONDS
        try:
            is_done = self._work.do(job, is_stuck=is_stuck)
            ended = (JobState.READY, "") if is_done else None
        except Exception as exc:  # noqa: BLE001  the thread must outlive any one clip
            ended = self._failure(job, exc)
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()
                if ended is None:
                    self._put_aside(job)
                else:
                    self.num_finished += 1
                    self._end(job, *ended)
        if not job.is_urgent:
            now = self._clock()
            self._rests_until = now + self._work.rest_seconds(now - began_at)

    def _next(self) -> EncodeJob | ThreadCall | None:
        """Wait for a call or a job that may begin; None if the queue is closed."""
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

    def _failure(self, job: EncodeJob, exc: Exception) -> tuple[JobState, str]:
        reason = str(exc) or repr(exc)
        self._warnings.warn_of(
            f"encoding: {type(exc).__name__}",
            "Encoding audio %s by %s failed: %s",
            job.key.audio_sha256,
            job.encoder_name,
            errors.log_text_of(exc),
        )
        if isinstance(exc, errors.AudioGoneError):
            return JobState.NO_AUDIO, reason
        if isinstance(exc, errors.AWAY):
            return JobState.AWAY, reason
        self._work.times.num_failed[job.encoder_name] += 1
        if isinstance(exc, errors.EncodersChangedError):
            return JobState.NO_ENCODER, ""
        self._work.note_failed(job, reason)
        return JobState.FAILED, reason

    def _put_aside(self, job: EncodeJob) -> None:
        now = self._clock()
        job.not_before = now + self._work.turns.look_again_seconds
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


def _closed() -> errors.EncodeError:
    return errors.EncodeError("the encode thread is closed")
