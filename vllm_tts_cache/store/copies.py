"""Copies of objects in this machine's directory, within a budget.

Several processes share the directory, and each looks after all of it: who has written
a part of the budget goes through it once, and removes what was read longest ago.
"""

import os
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.store.directory import StoreDirectory

# Of the budget: how much is written before somebody looks, and how much goes at least.
_LOOK_PART, _FREE_PART = 0.05, 0.1
_TOUCH_SECONDS = 60.0


class Copies:
    """Files whose truth is elsewhere; safe in any thread and any process.

    Args:
        directory: Where they are.
        max_bytes: Of all of them; more for as long as somebody takes to look.
    """

    def __init__(self, directory: StoreDirectory, max_bytes: int):
        self._files = directory
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._trimming = threading.Lock()
        self._written = max_bytes  # the first write looks at what others left

    def read(self, audio_sha256: str, kind: str) -> bytes | None:
        """A copy's bytes; None if there is none.

        Raises: StorageError.
        """
        blob = self._files.read(audio_sha256, kind)
        if blob is not None:
            _touch(self._files.file_name(audio_sha256, kind))
        return blob

    def write(self, audio_sha256: str, kind: str, data: bytes) -> None:
        """Keep a copy, over what is there; others may go for it.

        Raises: StorageError.
        """
        staged = self._files.stage(data)
        try:
            self._files.place(staged, audio_sha256, kind)
        finally:
            with suppress(OSError):
                staged.unlink(missing_ok=True)
        self._count(len(data))

    def remove(self, audio_sha256: str, kinds: Collection[str]) -> None:
        """Remove copies. Raises: StorageError."""
        self._files.remove(audio_sha256, kinds)

    def has_any(self, audio_sha256: str) -> bool:
        """Whether anything of an audio is here. Raises: StorageError."""
        return self._files.has_any(audio_sha256)

    def remove_all(self, audio_sha256: str) -> None:
        """Remove all that is here of an audio. Raises: StorageError."""
        self._files.remove_all(audio_sha256)

    def kinds(self, audio_sha256: str) -> set[str]:
        """Of which files of an audio there are copies. Raises: StorageError."""
        return self._files.kinds(audio_sha256)

    def trim(self) -> int:
        """Remove what is over the budget, read longest ago first; walks all of it.

        Raises: StorageError.
        """
        found = sorted(self._all())
        excess = sum(size for _, size, _, _ in found) - self._max_bytes
        if excess <= 0:
            return 0
        excess += int(self._max_bytes * _FREE_PART)
        num_removed = 0
        for _, num_bytes, sha, kind in found:
            if excess <= 0:
                break
            self._files.remove(sha, [kind])
            excess -= num_bytes
            num_removed += 1
        return num_removed

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._written += num_bytes
            if self._written < self._max_bytes * _LOOK_PART:
                return
            self._written = 0
        # One at a time is enough, and who writes does not wait for it.
        if self._trimming.acquire(blocking=False):
            threading.Thread(
                target=self._trim_aside, name="tts-cache-trim", daemon=True
            ).start()

    def _trim_aside(self) -> None:
        try:
            with suppress(StorageError):  # whoever reads or writes next logs it
                self.trim()
        finally:
            self._trimming.release()

    def _all(self) -> list[tuple[float, int, str, str]]:
        found: list[tuple[float, int, str, str]] = []
        for prefix in self._files.prefixes():
            for sha in self._files.addresses(prefix):
                for kind in self._files.kinds(sha):
                    path = Path(self._files.file_name(sha, kind))
                    with storage_errors(path), suppress(FileNotFoundError):
                        stat = path.stat()
                        found.append((stat.st_mtime, stat.st_size, sha, kind))
            time.sleep(0)  # whoever serves requests in this process gets to it
        return found


def _touch(name: str) -> None:
    """Count a file as read now; once a minute is enough to tell what goes first."""
    with suppress(OSError):
        now = time.time()
        if now - os.stat(name).st_mtime > _TOUCH_SECONDS:  # noqa: PTH116  a Path costs
            os.utime(name, (now, now))
