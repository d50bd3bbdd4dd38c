"""How long the encode thread rests after a job that no request waits for.

On a CPU the thread shares more with decoding than its priority can settle: the
interpreter's lock, caches, memory. Voices that are added by the thousand would take
these all the time, so while others compute in this process they get a share of it.
"""

import time
from collections.abc import Callable

# Of the time that the job took; streams have the process to themselves for so long.
FACTOR = 2.0
MAX_SECONDS = 10.0
# Of a core, by other threads of the process: above what one that only waits takes.
BUSY_CORES = 0.2

Clock = Callable[[], float]


class EncodeRests:
    """Looks at what else the process does during a job; for the encode thread only.

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
        self._began_at = self._others_before = 0.0

    def begin(self) -> None:
        """A job begins."""
        self._began_at, self._others_before = self._wall(), self._others()

    def seconds(self) -> float:
        """How long to rest, now that it has ended; 0 where nobody else computes."""
        took = self._wall() - self._began_at
        if took <= 0 or self._others() - self._others_before < BUSY_CORES * took:
            return 0.0
        return min(FACTOR * took, MAX_SECONDS)

    def _others(self) -> float:
        return self._process() - self._thread()
