"""Where stored bytes are: what the store needs of a directory, or of a bucket."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from sqlalchemy import Connection

from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.store.binding import StoreId

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Bytes that are written, and nobody's yet.

    Attributes:
        data: The bytes.
        path: Where a directory has them; None in a bucket.
        object_name: Where a bucket has them; None in a directory.
    """

    data: bytes
    path: Path | None = None
    object_name: str | None = None


class TakenAwayError(Exception):
    """What was staged is nobody's any more: it took too long, or was deleted."""


class Blobs(Protocol):
    """The bytes of stored files, by address and kind; safe in any thread.

    Every method raises StorageError if what it needs fails. Those that take a
    connection are called in a write transaction of the catalogue, and must not wait for
    a network.

    Attributes:
        is_remote: Whether the truth is elsewhere, and the directory is its cache.
    """

    is_remote: bool

    def counts(self) -> dict[str, int]:
        """How many files were fetched, lost and damaged elsewhere; empty if here."""
        ...

    def has(self, file: StoredFile | None) -> bool:
        """Whether a row's bytes are there, so far as one look tells."""
        ...

    def stage(self, data: bytes, audio_sha256: str) -> Staged:
        """Write bytes that are nobody's yet; `place` them, and `unstage` them after."""
        ...

    def place(
        self, db: Connection, staged: Staged, audio_sha256: str, kind: str
    ) -> str | None:
        """Make them a file's, whose row is about to be written; return its object.

        Raises:
            TakenAwayError: Stage them anew.
        """
        ...

    def remove_strays(self) -> list[str]:
        """Remove what the catalogue knows nothing of; returns what, a line each.

        It takes as long as there is anything: for whoever looks after the store.
        """
        ...

    def unstage(self, staged: Staged) -> None:
        """Let go of what was staged, whatever became of it; raises nothing."""
        ...

    def unplace(self, audio_sha256: str, kind: str, db: Connection) -> None:
        """Undo `place` after its transaction failed, and the row is not there."""
        ...

    def cache(self, staged: Staged, audio_sha256: str, kind: str) -> None:
        """Have bytes here that were placed and committed; raises nothing."""
        ...

    def read(
        self, audio_sha256: str, kind: str, parse: Callable[[bytes], T]
    ) -> T | None:
        """Return what the bytes mean; None if they are not stored. It may take long.

        Args:
            audio_sha256: The address.
            kind: Of the file.
            parse: Raises EncodingCorruptError or SourceCorruptError for wrong bytes;
                they are set aside then, so that the next to store them heals it.
        """
        ...

    def read_here(
        self, audio_sha256: str, kind: str, parse: Callable[[bytes], T]
    ) -> T | None:
        """As `read`, of the directory alone: no query, no lock, no network."""
        ...

    def remove(self, db: Connection, audio_sha256: str, kinds: Collection[str]) -> None:
        """Remove files whose rows go in this transaction, or are not there."""
        ...

    def discard(
        self, db: Connection, audio_sha256: str, keep: Collection[str], deletion_id: int
    ) -> None:
        """Begin to remove an audio but for what is kept; `finish_discard` ends it."""
        ...

    def finish_discard(self, audio_sha256: str | None, deletion_id: int) -> None:
        """End what was discarded. Raises: StorageError: Something is left."""
        ...

    def has_copies(self, audio_sha256: str) -> bool:
        """Whether `delete_copies` has something to do: a look or two, no list."""
        ...

    def delete_copies(self, audio_sha256: str) -> None:
        """Delete what this machine has of an audio that is nobody's; asks nobody."""
        ...

    def delete_unstored(self, audio_sha256: str) -> None:
        """Delete what this machine has of an audio and no row tells of."""
        ...

    @property
    def store_id(self) -> StoreId:
        """What processes compare that must use the same; may read a file."""
        ...

    def check_still(self) -> None:
        """See that the truth has not been taken away. Raises: StorageError."""
        ...

    def problems(self) -> list[str]:
        """Read all files and say what is wrong, a line each; changes nothing."""
        ...

    def sweep(self) -> int:
        """Remove what nobody has; returns how much of it there was."""
        ...
