"""How the encode thread gives way to decoding on a CPU, and for how long."""

import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

logger = logging.getLogger("vllm.vllm_tts_cache")

_NICEST = 19
# For where the kernel lets nobody leave SCHED_IDLE: a quarter of a core against one
# thread that wants all of it, where nice 19 would be a seventieth.
_FIXED_NICE = 5


@dataclass(frozen=True, slots=True)
class _Job:
    began: float
    is_over: threading.Event = field(default_factory=threading.Event)


class Politeness:
    """Lets the thread that makes it run on what others leave over, up to a bound.

    A job begins in ``SCHED_IDLE``. After ``bound_seconds`` the thread becomes a normal
    one at nice 19, after as long again at the nice value that it came with; the next
    job begins in ``SCHED_IDLE`` again. What a job waited for others does not count, or
    a hundred voices that arrive together would leave no job that gives way at all.

    An unprivileged thread may enter ``SCHED_IDLE`` and not leave it, unless
    ``RLIMIT_NICE`` is 20. There the thread has one fixed nice value instead.

    Raises:
        OSError, AttributeError: Not Linux, or not allowed here.
    """

    def __init__(self, bound_seconds: float):
        self._bound_seconds = bound_seconds
        self._thread_id = threading.get_native_id()
        self._lock = threading.Lock()  # a job's end, and every step up
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._nice = os.getpriority(os.PRIO_PROCESS, self._thread_id)
        self._returns = _can_return(self._nice)
        if not self._returns:
            nice = max(self._nice, _FIXED_NICE)
            os.setpriority(os.PRIO_PROCESS, self._thread_id, nice)
            logger.info(
                "The encode thread stays at nice %d: without CAP_SYS_NICE or "
                "RLIMIT_NICE 20 it could not end giving way further.",
                nice,
            )
            return
        # Started before this thread is idle: a new thread inherits the class, and
        # an idle watcher would starve beside the thread that it is to help.
        threading.Thread(
            target=self._watch, name="tts-cache-politeness", daemon=True
        ).start()
        _idle(self._thread_id)

    @contextmanager
    def job(self) -> Iterator[None]:
        """Run one job inside the block."""
        if not self._returns:
            yield
            return
        job = _Job(time.monotonic())
        self._jobs.put(job)
        try:
            yield
        finally:
            with self._lock:
                job.is_over.set()
                _idle(self._thread_id)

    def _watch(self) -> None:
        while True:
            job = self._jobs.get()
            for num_bounds, nice in ((1, _NICEST), (2, self._nice)):
                due = job.began + num_bounds * self._bound_seconds
                job.is_over.wait(max(0.0, due - time.monotonic()))
                with self._lock:
                    if not job.is_over.is_set():
                        _normal(self._thread_id, nice)


def _idle(thread_id: int) -> None:
    os.sched_setscheduler(thread_id, os.SCHED_IDLE, os.sched_param(0))


def _normal(thread_id: int, nice: int) -> None:
    # The nice value first: SCHED_IDLE ignores it, and the class must not be normal
    # at the old value even for a moment.
    os.setpriority(os.PRIO_PROCESS, thread_id, nice)
    os.sched_setscheduler(thread_id, os.SCHED_OTHER, os.sched_param(0))


def _can_return(nice: int) -> bool:
    """Tell whether a thread may leave SCHED_IDLE, by moving one that does nothing."""
    go = threading.Event()
    probe = threading.Thread(target=go.wait, daemon=True)
    probe.start()
    thread_id = probe.native_id
    assert thread_id is not None  # it has started
    try:
        _idle(thread_id)
        _normal(thread_id, _NICEST)
        _normal(thread_id, nice)
    except PermissionError:
        return False
    finally:
        go.set()
        probe.join()
    return True
