"""Stored bytes in a directory that all who use it have: files are the truth."""

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TypeVar

from sqlalchemy import Connection

from vllm_tts_cache.catalogue import dialect, stored_files
from vllm_tts_cache.catalogue.catalogue import Catalogue
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.record import AUDIO_KIND
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import (
    EncodingCorruptError,
    SourceCorruptError,
    StorageError,
)
from vllm_tts_cache.store import binding, verification
from vllm_tts_cache.store.blobs import Staged
from vllm_tts_cache.store.directory import StoreDirectory
from vllm_tts_cache.store.home import StoreHome, home_of

T = TypeVar("T")


class DirectoryBlobs:
    """Files of a `StoreDirectory`; see `Blobs`."""

    is_remote = False

    def __init__(self, directory: StoreDirectory, database: Database):
        self._files = directory
        self._database = database

    def counts(self) -> dict[str, int]:
        """Nothing: all files are here."""
        return {}

    def has(self, file: StoredFile | None) -> bool:
        """Whether the row's file is there."""
        return file is not None and self._files.exists(file.audio_sha256, file.kind)

    def stage(self, data: bytes, audio_sha256: str) -> Staged:  # noqa: ARG002
        """Write a private file."""
        return Staged(data=data, path=self._files.stage(data))

    def place(
        self, db: Connection, staged: Staged, audio_sha256: str, kind: str
    ) -> None:
        """Move it to its name: in the transaction, so that nobody else does."""
        del db
        if staged.path is None:
            raise StorageError("staged in a bucket, placed in a directory")
        self._files.place(staged.path, audio_sha256, kind)

    def remove_strays(self) -> list[str]:
        """Nothing: a recovery goes through all files."""
        return []

    def unstage(self, staged: Staged) -> None:
        """Unlink it, if it was not moved; what stays is swept with the process."""
        if staged.path is not None:
            with suppress(OSError):
                staged.path.unlink(missing_ok=True)

    def unplace(self, audio_sha256: str, kind: str, db: Connection) -> None:
        """Remove the file again."""
        self.remove(db, audio_sha256, [kind])

    def cache(self, staged: Staged, audio_sha256: str, kind: str) -> None:
        """Nothing: it is here."""

    def read(
        self, audio_sha256: str, kind: str, parse: Callable[[bytes], T]
    ) -> T | None:
        """Read the file."""
        try:
            return self._parsed(audio_sha256, kind, parse)
        except SourceCorruptError:
            # It must not hide that the bytes are wrong.
            with suppress(StorageError):
                self._set_aside_audio(audio_sha256, parse)
            raise
        except EncodingCorruptError:
            with suppress(StorageError):
                self._files.set_aside(audio_sha256, kind)
            raise

    def read_here(
        self, audio_sha256: str, kind: str, parse: Callable[[bytes], T]
    ) -> T | None:
        """Read the file."""
        return self.read(audio_sha256, kind, parse)

    def stored_bytes(self, file: StoredFile) -> bytes | None:
        """Read the file."""
        return self._files.read(file.audio_sha256, file.kind)

    def remove(self, db: Connection, audio_sha256: str, kinds: Collection[str]) -> None:
        """Unlink files."""
        dialect.check_turn(db)
        self._files.remove(audio_sha256, kinds)

    def discard(
        self, db: Connection, audio_sha256: str, keep: Collection[str], deletion_id: int
    ) -> None:
        """Move the audio's directory into the trash, or unlink a part of it."""
        if not keep:
            dialect.check_turn(db)
            self._files.discard(audio_sha256, deletion_id)
            return
        self.remove(db, audio_sha256, self._files.kinds(audio_sha256) - set(keep))
        self._files.delete_quarantine(audio_sha256)

    def finish_discard(self, audio_sha256: str | None, deletion_id: int) -> None:
        """Empty the trash."""
        del audio_sha256
        self._files.empty_trash(deletion_id)

    def has_copies(self, audio_sha256: str) -> bool:
        """Never: files here are no copies."""
        del audio_sha256
        return False

    def delete_copies(self, audio_sha256: str) -> None:
        """Nothing: whoever deletes removes the files for all."""

    delete_unstored = delete_copies

    @property
    def home(self) -> StoreHome:
        """The directory."""
        return home_of(self._files.root)

    def check_still(self) -> None:
        """See that the directory is the catalogue's, where it may be unmounted."""
        if self._database.backend.has_leases:
            binding.check_still(self._files.root, self._database)

    def problems(self, catalogue: Catalogue) -> list[str]:
        """Compare files and rows."""
        return verification.problems(self._files, catalogue)

    def sweep(self) -> int:
        """Nothing: files without a row are found by who goes through the directory."""
        return 0

    def _parsed(
        self, audio_sha256: str, kind: str, parse: Callable[[bytes], T]
    ) -> T | None:
        blob = self._files.read(audio_sha256, kind)
        return None if blob is None else parse(blob)

    def _set_aside_audio(self, sha: str, parse: Callable[[bytes], object]) -> None:
        """Move audio whose bytes are wrong into the quarantine, its row with it."""
        with self._database.write() as db:
            # A registration may have put it right since it was read.
            try:
                if self._parsed(sha, AUDIO_KIND, parse) is not None:
                    return
            except SourceCorruptError:
                dialect.check_turn(db)
                self._files.set_aside(sha, AUDIO_KIND)
            stored_files.remove(db, sha, [AUDIO_KIND])
