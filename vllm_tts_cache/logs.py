"""What is logged and shown: no flood of warnings, no control characters.

A failing disk or worker cannot fill a log (`ThrottledLog`), and a text of others is one
line on a terminal and moves no cursor (`printable`).
"""

import logging
import math
import threading
import time
from collections.abc import Callable

from cachetools import LRUCache

INTERVAL_SECONDS = 60.0
# A cause is a few words of code, not of a client; this is for the one that is not.
_MAX_CAUSES = 256

_MAX_CHARS = 1000


class ThrottledLog:
    """Writes at most one line per cause and minute; safe in any thread."""

    def __init__(
        self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic
    ):
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        # By its cause: when the last line was logged, and how many were left out since.
        self._causes = LRUCache[str, tuple[float, int]](_MAX_CAUSES)

    def warn_of(
        self,
        cause: str,
        message: str,
        *values: object,
        mistake: BaseException | None = None,
    ) -> None:
        """Log a warning, unless its cause had a line within the last minute.

        The next line of a cause says how many were left out before it.

        Args:
            cause: What goes wrong, as a constant: "reading an encoding". No address
                and no name, or a thousand voices on a full disk are a thousand lines.
            message: The line, with ``%``-placeholders for the values, as in `logging`.
            values: What stands in them; may name the one voice that it happened to.
            mistake: Of ours, whose traceback goes with the line.
        """
        now = self._clock()
        with self._lock:
            logged_at, num_suppressed = self._causes.get(cause, (-math.inf, 0))
            if now - logged_at < INTERVAL_SECONDS:
                self._causes[cause] = logged_at, num_suppressed + 1
                return
            self._causes[cause] = now, 0
        line = message % values if values else message
        if num_suppressed:
            line += f" ({num_suppressed} more like this were not logged)"
        # The caller's own line, not this one, where a formatter shows it.
        self._logger.warning("%s", line, stacklevel=2, exc_info=mistake)


def printable(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Spell out control and invisible characters, and cut what is long."""
    shown = text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
    if shown.isprintable():
        return shown
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in shown
    )


def utf8(text: str) -> str:
    """Put ``?`` in the place of stray bytes, as the name of a file may hold."""
    return text.encode(errors="replace").decode()


def encodable(text: str) -> str:
    """Spell out halves of characters, which no answer, log or file can hold."""
    return text.encode(errors="backslashreplace").decode()
