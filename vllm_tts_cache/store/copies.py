"""Copies of a bucket's objects in this machine's directory, within a budget.

Several processes share the directory, and each looks after all of it: a process that
has written a part of the budget walks it once, and removes what was read longest ago.
"""

import logging
import os
import threading
import time
from contextlib import suppress

from vllm_tts_cache.catalogue import stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.store.directory import StoreDirectory
from vllm_tts_cache.store.memory import Counters

# Of the budget: how much is written before a walk, and how much more than the excess
# goes then.
_LOOK_PART, _FREE_PART = 0.05, 0.1
_TOUCH_SECONDS = 60.0


class Copies:
    """Copies of objects in this machine's directory; safe in any thread and process.

    Any of them may be missing, and none outlives its row for long. All of them have
    ``max_bytes`` at most, and more for as long as a `trim` takes.

    Attributes:
        counters: Objects that were ``fetched``, ``lost`` and ``corrupt``.
    """

    def __init__(self, directory: StoreDirectory, database: Database, max_bytes: int):
        self.directory = directory
        self._database = database
        self._max_bytes = max_bytes
        self.counters = Counters()
        self._lock = threading.Lock()
        self._trimming = threading.Lock()
        self._written = max_bytes  # the first write looks at what others left
        self._log = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

    def counts(self) -> dict[str, int]:
        """How many objects were fetched, were not there, and were damaged."""
        counted = self.counters.snapshot()
        return {name: counted[name] for name in ("fetched", "lost", "corrupt")}

    def read(self, audio_sha256: str, kind: str) -> bytes | None:
        """A copy's bytes, unverified; None if there is none. Raises: StorageError."""
        blob = self.directory.read(audio_sha256, kind)
        if blob is not None:
            _touch(self.directory.file_name(audio_sha256, kind))
        return blob

    def keep(self, file: StoredFile, data: bytes) -> None:
        """Write a row's copy, and delete it if the row is not there any more.

        A deletion removes copies after the row: one of the two sees the other. A disk
        that refuses it is logged: the object is read again then.

        Raises: StorageError.
        """
        sha, kind = file.audio_sha256, file.kind
        try:
            staged = self.directory.stage(data)
            try:
                self.directory.place(staged, sha, kind)
            finally:
                with suppress(OSError):
                    staged.unlink(missing_ok=True)
            self._count(len(data))
        except StorageError as exc:
            self._log.warn_of("copies", "Keeping a copy of an object: %s", exc)
            return
        try:
            with self._database.read() as db:
                now = stored_files.find(db, sha, kind)
            is_current = now is not None and now.object_name == file.object_name
        except StorageError:
            is_current = False
        if not is_current:
            self.directory.remove(sha, [kind])

    def delete_unstored(self, audio_sha256: str) -> None:
        """Delete the copies of an audio that have no row."""
        with self._database.read() as db:
            stored = {file.kind for file in stored_files.of_audio(db, audio_sha256)}
        kinds = self.directory.kinds(audio_sha256)
        self.directory.remove(audio_sha256, kinds - stored)

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
            self.directory.remove(sha, [kind])
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
        for prefix in self.directory.prefixes():
            for sha, kind, stat in self.directory.files(prefix):
                found.append((stat.st_mtime, stat.st_size, sha, kind))
            time.sleep(0)  # whoever serves requests in this process gets to it
        return found


def _touch(name: str) -> None:
    """Count a file as read now; once a minute is enough to tell what goes first."""
    with suppress(OSError):
        now = time.time()
        if now - os.stat(name).st_mtime > _TOUCH_SECONDS:  # noqa: PTH116  a Path costs
            os.utime(name, (now, now))
