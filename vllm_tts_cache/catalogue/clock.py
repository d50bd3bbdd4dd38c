"""The time that all servers of a catalogue have in common."""

import time


class CatalogueClock:
    """Unix seconds of the catalogue's database, told without asking it.

    The clocks of machines differ, by hours where nobody looks after them. Who asks the
    database anyway says what time it is there; until then, and in a directory of our
    own, it is this machine's.
    """

    def __init__(self) -> None:
        self._ahead_seconds = 0.0

    def now(self) -> float:
        """What time it is there."""
        return time.time() + self._ahead_seconds

    def set(self, now: float) -> None:
        """It is so late there."""
        self._ahead_seconds = now - time.time()
