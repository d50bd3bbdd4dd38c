"""Logging without floods of warnings, counts, and text without control characters.

A failing disk or worker cannot fill a log (`ThrottledLog`), and a foreign text shows as
one line on a terminal and moves no cursor (`printable`).
"""

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from cachetools import LRUCache

logger = logging.getLogger("vllm.vllm_tts_cache")

INTERVAL_SECONDS = 60.0
# Causes are constants of the code; this bounds memory if one is not.
_MAX_CAUSES = 256

_MAX_CHARS = 1000


class Counters:
    """Named counts that threads may add to."""

    def __init__(self) -> None:
        # No Counter: it handles a missing name in Python code, which slows each hit.
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def add(self, name: str, number: int = 1) -> None:
        """Add to the count of a name."""
        with self._lock:
            self._counts[name] += number

    def snapshot(self) -> Counter[str]:
        """Return a copy; a name never counted is 0."""
        with self._lock:
            return Counter(self._counts)


class ThrottledLog:
    """Writes at most one line per cause and minute; safe in any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        # cause -> (time of its last line, number of lines suppressed since).
        self._causes = LRUCache[str, tuple[float, int]](_MAX_CAUSES)

    def warn_of(
        self,
        cause: str,
        message: str,
        *values: object,
        mistake: BaseException | None = None,
    ) -> None:
        """Log a warning, unless its cause had a line within the last minute.

        The next line of a cause says how many were suppressed before it.

        Args:
            cause: What goes wrong, as a constant: "reading an encoding". No address
                and no name, or a thousand voices on a full disk are a thousand lines.
            message: The line, with ``%``-placeholders for the values, as in `logging`.
            values: For the placeholders; may name the one voice that is concerned.
            mistake: An exception from a bug of ours; its traceback is logged, too.
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
        # A formatter that shows the source line shows the caller's, not this one.
        logger.warning("%s", line, stacklevel=2, exc_info=mistake)


def printable(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Cut a text at ``max_chars``, then escape control and invisible characters."""
    shown = text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
    if shown.isprintable():
        return shown
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in shown
    )


def utf8(text: str) -> str:
    """Replace stray bytes, which the name of a file may hold, by ``?``."""
    return text.encode(errors="replace").decode()


def encodable(text: str) -> str:
    """Escape lone surrogates, which no answer, log or file can hold."""
    return text.encode(errors="backslashreplace").decode()
