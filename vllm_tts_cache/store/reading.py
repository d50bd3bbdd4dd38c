"""Reading stored bytes: no method here removes a row, an object or a stored file.

A read has three answers. Bytes that are not there are None; bytes that are wrong raise
SourceCorruptError or EncodingCorruptError; a disk or a bucket that cannot be asked
raises another StorageError. What follows from an answer is the caller's: a network that
errs for a moment must not cost anybody a voice.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from vllm_tts_cache.catalogue import stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import (
    EncodingCorruptError,
    ObjectStoreError,
    SourceCorruptError,
)
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.store import binding
from vllm_tts_cache.store.copies import Copies
from vllm_tts_cache.store.directory import DirectoryReader, is_whole

if TYPE_CHECKING:
    from vllm_tts_cache.store.bucket import Bucket

T = TypeVar("T")

_CORRUPT = (EncodingCorruptError, SourceCorruptError)
_log = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))


class BucketReader:
    """Reads the objects of a bucket, and this machine's copies of them."""

    def __init__(self, database: Database, bucket: "Bucket", copies: Copies):
        self._database = database
        self._bucket = bucket
        self._copies = copies

    def has(self, file: StoredFile, *, is_read: bool = False) -> bool:
        """As of a directory: without reading the object, the row alone tells."""
        if is_read:
            return is_whole(file, self._bucket.get(str(file.object_name)))
        return not file.is_suspect

    def read(
        self, audio_sha256: str, kind: str, parse: Callable[[bytes], T]
    ) -> T | None:
        """As of a directory: the copy, or the object, of which a copy is kept then."""
        with suppress(*_CORRUPT):
            if (found := self.read_here(audio_sha256, kind, parse)) is not None:
                return found
        for is_last in (False, True):
            with self._database.read() as db:
                file = stored_files.find(db, audio_sha256, kind)
            if file is None:
                return None
            try:
                blob = self._fetched(file)
                found = None if blob is None else parse(blob)
            except _CORRUPT:
                # Once more: it may have been damaged on its way.
                if is_last:
                    self._copies.counters.add("corrupt")
                    raise
                continue
            if blob is not None:
                self._copies.keep(file, blob)
                return found
        # It was not replaced meanwhile either. Or is it the bucket that is not there?
        binding.check_still(self._bucket, self._database)
        self._copies.counters.add("lost")
        _log.warn_of(
            "a lost object",
            "An object of audio %s is not in the bucket: an encoding is made anew, "
            "audio is to be registered again.",
            audio_sha256,
        )
        return None

    def read_here(
        self, audio_sha256: str, kind: str, parse: Callable[[bytes], T]
    ) -> T | None:
        """As `read`, of the copy alone: no query, no lock, no network."""
        blob = self._copies.read(audio_sha256, kind)
        return None if blob is None else parse(blob)

    def _fetched(self, file: StoredFile) -> bytes | None:
        blob = self._bucket.get(name := str(file.object_name))
        if blob is not None and len(blob) != file.num_bytes:
            raise ObjectStoreError(
                self._bucket.where,
                f"{name} has {len(blob)} bytes instead of {file.num_bytes}",
            )
        self._copies.counters.add("fetched")
        return blob


BlobReader = DirectoryReader | BucketReader
