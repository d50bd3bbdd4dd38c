"""Look-ups that take less than handing them to a thread does."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

SLOW_SECONDS = 0.005
# One may be slow because the process was not scheduled: threads would not help.
NUM_SLOW = 2
THREADED_PER_SLOW = 1000.0

T = TypeVar("T")


class QuickLooks:
    """Looks something up on the event loop, for as long as the disk is quick.

    An indexed read of the registry takes 25 us and the status of a file 7 us, a hop
    to a thread and back 50 us and more. A network disk may take a thousand times that
    and hold up everybody: after ``NUM_SLOW`` looks in a row that took longer than
    ``SLOW_SECONDS``, the next ones are done in a thread, for a thousand times as long
    as those took. So a disk that stays slow holds up the loop for no more than a
    thousandth of the time.

    Args:
        clock: Seconds, from any moment on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._threaded_until = clock()
        self._slow: list[float] = []

    async def run(self, look: Callable[[], T]) -> T:
        """Return what ``look`` returns, or raise what it raises.

        It must be small, whatever a client sends, and safe in any thread.
        """
        began = self._clock()
        if began < self._threaded_until:
            return await asyncio.to_thread(look)
        try:
            return look()
        finally:
            self._took(self._clock() - began)

    def _took(self, seconds: float) -> None:
        if seconds <= SLOW_SECONDS:
            self._slow.clear()
            return
        self._slow.append(seconds)
        if len(self._slow) >= NUM_SLOW:
            threaded = THREADED_PER_SLOW * sum(self._slow)
            self._threaded_until = self._clock() + threaded
            self._slow.clear()
