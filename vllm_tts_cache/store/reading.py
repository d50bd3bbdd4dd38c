"""Reading a bucket's objects, through copies of them in this machine's directory.

A read has three results. Missing bytes are None; damaged bytes raise SourceCorruptError
or EncodingCorruptError; a disk or a bucket that fails raises another StorageError. The
caller decides what follows: a short failure of a network must not delete a voice. So no
method here removes a row or an object.

Copies are kept within a budget. Several processes share the directory, and each trims
all of it: a process that has written 5 % of the budget walks it once, and removes the
copies read longest ago.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from vllm_tts_cache import errors
from vllm_tts_cache.catalogue import stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.logs import Counters, ThrottledLog
from vllm_tts_cache.store import binding
from vllm_tts_cache.store.directory import DirectoryReader, StoreDirectory, is_whole
from vllm_tts_cache.store.encoding import EncodingKey

if TYPE_CHECKING:
    from vllm_tts_cache.store.bucket import Bucket

T = TypeVar("T")

# Shares of the budget: what a process writes between two walks, and what a walk frees
# beyond the excess.
_LOOK_PART, _FREE_PART = 0.05, 0.1
_TOUCH_SECONDS = 60.0
_CORRUPT = (errors.EncodingCorruptError, errors.SourceCorruptError)
_log = ThrottledLog()


class Copies:
    """Copies of objects in this machine's directory; safe in any thread and process.

    Any copy may be missing, and none outlives its row for long. Together they take
    ``max_bytes``, and up to 5 % more for each process until it trims.

    Attributes:
        counters: Requests for objects (``fetched``), ``lost`` and ``corrupt`` objects.
    """

    def __init__(self, directory: StoreDirectory, database: Database, max_bytes: int):
        self.directory = directory
        self._database = database
        self._max_bytes = max_bytes
        self.counters = Counters()
        self._lock = threading.Lock()
        self._trimming = threading.Lock()
        self._written = max_bytes  # the first write trims what others left

    def read(self, audio_sha256: str, artifact: str) -> bytes | None:
        """Return a copy's bytes, unverified; None if missing. Raises: StorageError."""
        blob = self.directory.read(audio_sha256, artifact)
        if blob is not None:
            name = self.directory.file_name(audio_sha256, artifact)
            with suppress(OSError):
                now = time.time()
                # Once a minute is enough to order evictions.
                if now - os.stat(name).st_mtime > _TOUCH_SECONDS:  # noqa: PTH116  slow
                    os.utime(name, (now, now))
        return blob

    def keep(self, file: StoredFile, data: bytes) -> None:
        """Write the copy of a row's object; remove it if the row is gone or changed.

        A deletion removes the row, then the copy: so it or this method does. A failure
        to write is logged: the next read fetches the object again.

        Raises: StorageError: An outdated copy was not removed.
        """
        sha, artifact = file.audio_sha256, file.artifact
        try:
            staged = self.directory.stage(data, sha, artifact)
            try:
                self.directory.place(staged)
            finally:
                self.directory.unstage(staged)
            self._count(len(data))
        except errors.StorageError as exc:
            _log.warn_of("copies", "A copy was not kept: %s", exc)
            return
        try:
            with self._database.read() as db:
                now = stored_files.find(db, sha, artifact)
            is_current = now is not None and now.object_name == file.object_name
        except errors.StorageError:
            is_current = False
        if not is_current:
            self.directory.remove(sha, [artifact])

    def delete_unstored(self, audio_sha256: str) -> None:
        """Remove the copies of an audio that have no row."""
        with self._database.read() as db:
            stored = {file.artifact for file in stored_files.of_audio(db, audio_sha256)}
        artifacts = self.directory.artifacts(audio_sha256)
        self.directory.remove(audio_sha256, artifacts - stored)

    def trim(self) -> int:
        """Evict what exceeds the budget, read longest ago first; return how many.

        Raises: StorageError.
        """
        found: list[tuple[float, int, str, str]] = []
        for prefix in self.directory.prefixes():
            for sha, artifact, stat in self.directory.files(prefix):
                found.append((stat.st_mtime, stat.st_size, sha, artifact))
            time.sleep(0)  # lets threads that serve requests run
        excess = sum(size for _, size, _, _ in found) - self._max_bytes
        if excess <= 0:
            return 0
        excess += int(self._max_bytes * _FREE_PART)
        num_removed = 0
        for _, num_bytes, sha, artifact in sorted(found):
            if excess <= 0:
                break
            self.directory.remove(sha, [artifact])
            excess -= num_bytes
            num_removed += 1
        return num_removed

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._written += num_bytes
            if self._written < self._max_bytes * _LOOK_PART:
                return
            self._written = 0
        # A writer does not wait for it.
        trim = self._trim_aside
        threading.Thread(target=trim, name="tts-cache-trim", daemon=True).start()

    def _trim_aside(self) -> None:
        if self._trimming.acquire(blocking=False):  # one at a time is enough
            try:
                with suppress(errors.StorageError):  # the next read or write logs it
                    self.trim()
            finally:
                self._trimming.release()


class BucketReader:
    """Reads the objects of a bucket, and this machine's copies of them."""

    def __init__(self, database: Database, bucket: "Bucket", copies: Copies):
        self._database = database
        self._bucket = bucket
        self._copies = copies

    def has(self, file: StoredFile, *, is_read: bool = False) -> bool:
        """As `DirectoryReader.has`; without ``is_read`` only the row is checked."""
        if is_read:
            return is_whole(file, self._bucket.get(str(file.object_name)))
        return not file.is_suspect

    def read(
        self, key: EncodingKey, parse: Callable[[bytes, EncodingKey], T]
    ) -> T | None:
        """Read the copy, else the object, as `DirectoryReader.read`; keeps a copy."""
        audio_sha256, artifact = key.audio_sha256, key.encoder_fingerprint
        with suppress(*_CORRUPT):
            if (found := self.read_here(key, parse)) is not None:
                return found
        for is_last in (False, True):
            with self._database.read() as db:
                file = stored_files.find(db, audio_sha256, artifact)
            if file is None:
                return None
            if (blob := self._fetched(file)) is None:
                continue
            try:
                found = parse(blob, key)
            except _CORRUPT:
                # Read once more: the network may have damaged it.
                if is_last:
                    self._copies.counters.add("corrupt")
                    raise
                continue
            self._copies.keep(file, blob)
            return found
        # Its row stayed: the object is lost, unless the whole bucket is.
        binding.check_still(self._bucket, self._database)
        self._copies.counters.add("lost")
        _log.warn_of(
            "a lost object",
            "An object of audio %s is not in the bucket. An encoding is made anew; if "
            "it is the audio itself, register the voice again.",
            audio_sha256,
        )
        return None

    def read_here(
        self, key: EncodingKey, parse: Callable[[bytes, EncodingKey], T]
    ) -> T | None:
        """As `read`, from the copy only: no query, no lock, no network."""
        blob = self._copies.read(key.audio_sha256, key.encoder_fingerprint)
        return None if blob is None else parse(blob, key)

    def _fetched(self, file: StoredFile) -> bytes | None:
        if (blob := self._bucket.get(name := str(file.object_name))) is None:
            return None
        if len(blob) != file.num_bytes:
            reason = f"{name} has {len(blob)} bytes instead of {file.num_bytes}"
            raise errors.ObjectStoreError(self._bucket.where, reason)
        self._copies.counters.add("fetched")
        return blob


BlobReader = DirectoryReader | BucketReader
