"""Removes a worker's copies of deleted audio, beside the engine's thread."""

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from vllm_tts_cache.throttled_log import ThrottledLog

# Whoever asked for a removal asks again within a second or two.
_ASKED_AGAIN_SECONDS = 5.0


class DeletedCopies:
    """Has what this machine's disk has of deleted audio removed, on its own thread.

    An RPC holds up every stream for as long as a disk takes to list and to unlink, so
    it looks whether something is there, and is asked again until nothing is. The
    encode thread may be at another voice for as long as a minute.

    Args:
        has_copies: Whether there is something of an audio; a look or two.
        delete_copies: Removes all of it; raises for what is still there.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        has_copies: Callable[[str], bool],
        delete_copies: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._has_copies = has_copies
        self._delete_copies = delete_copies
        self._clock = clock
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tts-cache-copies")
        self._lock = threading.Lock()  # never held over a file
        self._underway: set[str] = set()
        self._removed_at: dict[str, float] = {}
        self._log = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

    def remaining(self, audio_sha256s: Collection[str]) -> list[str]:
        """Return the audios of which there are copies; they are removed soon.

        Raises: StorageError: Nobody can tell.
        """
        just_removed = self._take_removed(audio_sha256s)
        # What is there again belongs to a voice that exists: requests for it write
        # copies as fast as they are removed, and the caller would never be done.
        remaining = [
            sha
            for sha in audio_sha256s
            if sha not in just_removed and self._has_copies(sha)
        ]
        for sha in remaining:
            self._remove_soon(sha)
        return remaining

    def close(self) -> None:
        """End the thread after the audio in hand."""
        self._pool.shutdown(cancel_futures=True)

    def _take_removed(self, audio_sha256s: Collection[str]) -> set[str]:
        with self._lock:
            since = self._clock() - _ASKED_AGAIN_SECONDS
            recent = {sha: at for sha, at in self._removed_at.items() if at >= since}
            taken = recent.keys() & set(audio_sha256s)
            self._removed_at = {s: at for s, at in recent.items() if s not in taken}
            return taken

    def _remove_soon(self, sha: str) -> None:
        with self._lock:
            if sha in self._underway:
                return
            self._underway.add(sha)
        self._pool.submit(self._remove, sha)

    def _remove(self, sha: str) -> None:
        try:
            self._delete_copies(sha)
        except Exception as exc:  # noqa: BLE001  nobody looks at what it returns
            self._log.warn_of(
                "copies of deleted audio",
                "Copies of deleted audio are still on this machine's disk: %s",
                exc,
            )
            with self._lock:
                self._underway.discard(sha)
            return
        with self._lock:
            self._underway.discard(sha)
            self._removed_at[sha] = self._clock()
