"""Reading stored bytes: no method here removes a row, an object or a stored file.

A read has three results. Missing bytes are None; damaged bytes raise SourceCorruptError
or EncodingCorruptError; a disk or a bucket that fails raises another StorageError. The
caller decides what follows: a short failure of a network must not delete a voice.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from vllm_tts_cache import errors
from vllm_tts_cache.catalogue import stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.store import binding
from vllm_tts_cache.store.copies import Copies
from vllm_tts_cache.store.directory import DirectoryReader, is_whole
from vllm_tts_cache.store.encoding import EncodingKey

if TYPE_CHECKING:
    from vllm_tts_cache.store.bucket import Bucket

T = TypeVar("T")

_CORRUPT = (errors.EncodingCorruptError, errors.SourceCorruptError)
_log = ThrottledLog()


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
            try:
                blob = self._fetched(file)
                found = None if blob is None else parse(blob, key)
            except _CORRUPT:
                # Read once more: the network may have damaged it.
                if is_last:
                    self._copies.counters.add("corrupt")
                    raise
                continue
            if blob is not None:
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
        blob = self._bucket.get(name := str(file.object_name))
        if blob is not None and len(blob) != file.num_bytes:
            raise errors.ObjectStoreError(
                self._bucket.where,
                f"{name} has {len(blob)} bytes instead of {file.num_bytes}",
            )
        if blob is not None:
            self._copies.counters.add("fetched")
        return blob


BlobReader = DirectoryReader | BucketReader
