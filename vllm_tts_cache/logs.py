"""What is logged and shown: no flood of warnings, no control characters.

A failing disk or worker cannot fill a log (`ThrottledLog`), and a text of others is one
line on a terminal and moves no cursor (`printable`).
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

INTERVAL_SECONDS = 60.0
# A cause is a few words of code, not of a client; this is for the one that is not.
_MAX_CAUSES = 256

_MAX_CHARS = 1000


@dataclass(slots=True)
class _Cause:
    logged_at: float
    num_suppressed: int = 0


class ThrottledLog:
    """Writes at most one line per cause and minute; safe in any thread."""

    def __init__(
        self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic
    ):
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._causes: OrderedDict[str, _Cause] = OrderedDict()

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
        num_suppressed = self._turn(cause)
        if num_suppressed is None:
            return
        line = message % values if values else message
        if num_suppressed:
            line += f" ({num_suppressed} more like this were not logged)"
        # The caller's own line, not this one, where a formatter shows it.
        self._logger.warning("%s", line, stacklevel=2, exc_info=mistake)

    def _turn(self, cause: str) -> int | None:
        """Return how many lines were left out since the last; None: leave this out."""
        now = self._clock()
        with self._lock:
            known = self._causes.get(cause)
            if known is not None and now - known.logged_at < INTERVAL_SECONDS:
                known.num_suppressed += 1
                return None
            self._causes[cause] = _Cause(logged_at=now)
            self._causes.move_to_end(cause)
            if len(self._causes) > _MAX_CAUSES:
                self._causes.popitem(last=False)
        return 0 if known is None else known.num_suppressed


def printable(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Spell out control and invisible characters, and cut what is long."""
    shown = text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
    if shown.isprintable():
        return shown
    return "".join(
        character if character.isprintable() else _spelt(character)
        for character in shown
    )


def utf8(text: str) -> str:
    """Put ``?`` in the place of stray bytes, as the name of a file may hold."""
    return text.encode(errors="replace").decode()


def encodable(text: str) -> str:
    """Spell out halves of characters, which no answer, log or file can hold."""
    return text.encode(errors="backslashreplace").decode()


def _spelt(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
