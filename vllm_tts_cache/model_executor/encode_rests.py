"""How long jobs that no request waits for stay out of the encode thread after one.

On a CPU the thread shares more with decoding than its priority can settle: the
interpreter's lock, caches, memory. Voices that are added by the thousand would take
these all the time, so while others compute in this process they get a share of it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

# Of the time that the job took; streams have the process to themselves for so long.
FACTOR = 4.0
MAX_SECONDS = 10.0
# Of a core, by other threads of the process: above what one that only waits takes.
BUSY_CORES = 0.2
# Streams that end need a rest no longer: so often it is looked whether they have.
LOOK_SECONDS = 0.5

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Moment:
    wall: float = 0.0
    others: float = 0.0  # CPU seconds of the process's other threads

    def is_busy_until(self, later: "_Moment") -> bool:
        """Whether others computed from this moment to a later one."""
        seconds = later.wall - self.wall
        return seconds > 0 and later.others - self.others >= BUSY_CORES * seconds


class EncodeRests:
    """Looks at what else the process does; for the encode thread only.

    Args:
        wall: Seconds that passed.
        process: CPU seconds of the process.
        thread: CPU seconds of the calling thread.
    """

    def __init__(
        self,
        wall: Clock = time.monotonic,
        process: Clock = time.process_time,
        thread: Clock = time.thread_time,
    ):
        self._wall = wall
        self._process = process
        self._thread = thread
        self._began = self._looked = _Moment()
        self._until = 0.0

    def begin(self) -> None:
        """A job begins."""
        self._began = self._now()

    def rest(self) -> None:
        """That job has ended; while others compute, it is followed by a rest."""
        self._looked = now = self._now()
        self._until = now.wall
        if self._began.is_busy_until(now):
            self._until += min(FACTOR * (now.wall - self._began.wall), MAX_SECONDS)

    def seconds(self) -> float:
        """After how long to ask again; 0 if there is no rest, or it is over."""
        now = self._now()
        if now.wall >= self._until:
            return 0.0
        if now.wall - self._looked.wall >= LOOK_SECONDS:
            if not self._looked.is_busy_until(now):
                self._until = now.wall
                return 0.0
            self._looked = now
        return min(self._until, self._looked.wall + LOOK_SECONDS) - now.wall

    def _now(self) -> _Moment:
        return _Moment(self._wall(), self._process() - self._thread())
