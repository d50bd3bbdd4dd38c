"""Tells the catalogue which speakers are in use, though memory answers for them."""

import logging
import threading
from collections.abc import Callable, Sequence

from vllm_tts_cache.throttled_log import ThrottledLog

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

FLUSH_SECONDS = 30.0
CLOSE_SECONDS = 10.0
# More audios than a worker speaks within a flush; the rest is noted the next time.
MAX_NOTED = 65_536


class Recency:
    """Collects audios that were used, and hands them on in batches.

    A voice that is hot in memory is never read from the disk, so it would be the
    first to leave a full one. Noting a use is a set's ``add``: it may happen on the
    engine's thread. The thread that hands them on starts with the first use.

    Args:
        hand_on: Takes the audios that were used since the last batch.
        flush_seconds: How long uses are collected.
    """

    def __init__(
        self,
        hand_on: Callable[[Sequence[str]], None],
        *,
        flush_seconds: float = FLUSH_SECONDS,
    ):
        self._hand_on = hand_on
        self._flush_seconds = flush_seconds
        self._noted: set[str] = set()
        self._closing = threading.Event()
        self._has_some = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, audio_sha256: str) -> None:
        """Note a use."""
        noted = self._noted
        if audio_sha256 in noted or len(noted) >= MAX_NOTED:
            return
        noted.add(audio_sha256)
        if not self._has_some.is_set():
            self._has_some.set()
            self._start_thread()

    def close(self) -> None:
        """Hand on what was noted, and let the thread end."""
        self._closing.set()
        self.flush()
        self._has_some.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def flush(self) -> None:
        """Hand on what was noted."""
        self._has_some.clear()
        noted, self._noted = self._noted, set()
        used = sorted(noted)  # a copy: the engine's thread may still add to the set
        if not used:
            return
        try:
            self._hand_on(used)
        except Exception as exc:  # noqa: BLE001  a dead thread would note no use again
            message = "The use of %d speakers was not noted: %s"
            throttled.warn_of("noting uses", message, len(used), exc)

    def _start_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._run, name="tts-cache-recency", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._has_some.wait()
            if self._closing.wait(self._flush_seconds):
                return
            self.flush()
