"""How long the threads that take in uploads leave streams alone after each one.

Decoding, judging and storing a clip is work of this process, of the disk and of the
client's own; voices that come by the thousand would have a share of the cores for as
long as they come. A single upload beside streams is not held up.
"""

import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

# Of the time that the upload took: more come in a second than are encoded in it still.
FACTOR = 9.0
MAX_SECONDS = 2.0
# Streams that end need a rest no longer: so often it is looked whether they have.
LOOK_SECONDS = 0.25

P = ParamSpec("P")
T = TypeVar("T")


class UploadRests:
    """Each thread rests on its own; safe to use from all of them.

    Args:
        is_speaking: Whether a rest is of use to anybody.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        is_speaking: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._is_speaking = is_speaking
        self._clock = clock
        self._ended = threading.Event()
        self._of_thread = threading.local()

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the function returns, once this thread's last rest is over.

        Raises: Whatever it raises.
        """
        self._rest()
        began = self._clock()
        try:
            return function(*args, **kwargs)
        finally:
            now = self._clock()
            self._of_thread.until = now + min(FACTOR * (now - began), MAX_SECONDS)

    def end(self) -> None:
        """Let nobody rest any more."""
        self._ended.set()

    def _rest(self) -> None:
        until = getattr(self._of_thread, "until", 0.0)
        while (seconds := until - self._clock()) > 0 and self._is_speaking():
            if self._ended.wait(min(seconds, LOOK_SECONDS)):
                return
