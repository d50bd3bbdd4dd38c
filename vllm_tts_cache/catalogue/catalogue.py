"""The catalogue as its readers see it: what is registered, stored and being deleted."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vllm_tts_cache.catalogue import (
    deletions,
    dialect,
    imports,
    speakers,
    stored_files,
)
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import DeletionProgress
from vllm_tts_cache.catalogue.imports import ImportedFile
from vllm_tts_cache.catalogue.names import fold, is_storable
from vllm_tts_cache.catalogue.record import DEFAULT_TENANT, Segment, SpeakerRecord
from vllm_tts_cache.catalogue.speakers import Page
from vllm_tts_cache.catalogue.stored_files import Usage
from vllm_tts_cache.files import shared_file_system

logger = logging.getLogger("vllm.vllm_tts_cache")

FILE_NAME = "catalogue.sqlite3"

_NAMES_PER_READ = 1000


class Catalogue:
    """Queries over one database; any thread may ask.

    Every method raises StorageError if the database fails. Writing is for the
    store, which owns the files as well: see `store.speaker_store`.

    Attributes:
        database: Lends connections.
        is_local: Whether only this host has the file, so that a look takes
            microseconds and may be taken on an event loop.
    """

    def __init__(self, database: Database):
        self.database = database
        kind = shared_file_system(database.path.parent)
        self.is_local = kind is None
        if kind is not None:
            logger.warning(
                "SPEAKER_SAMPLES_DIR=%s is on %s. The catalogue needs one host and a "
                "local file system: SQLite's log is shared through memory. Do not "
                "start a second host on it.",
                database.path.parent,
                kind,
            )

    @property
    def path(self) -> Path:
        """The SQLite file."""
        return self.database.path

    def find(
        self, name: str, tenant: str = DEFAULT_TENANT
    ) -> tuple[SpeakerRecord, frozenset[str]] | None:
        """The speaker of that name, compared folded, and the kinds of its files.

        One indexed read, which waits for no lock.
        """
        if not is_storable(name):
            return None
        found = speakers.find_with_kinds(self.database, tenant, fold(name))
        return None if found is None else (found[0], frozenset(found[1]))

    def records(self, page: Page) -> list[SpeakerRecord]:
        """The speakers of a page.

        Raises:
            InvalidSpeakerError: ``limit`` is not positive, or a text is no text.
        """
        with self.database.read() as db:
            return speakers.records(db, page)

    def names(self, page: Page) -> list[str]:
        """The names of the same page, for less."""
        with self.database.read() as db:
            return speakers.names(db, page)

    def iter_names(self, tenant: str = DEFAULT_TENANT) -> Iterator[str]:
        """All names in order; holds no connection while the caller thinks.

        A speaker that comes or goes meanwhile may or may not be among them.
        """
        page = Page(limit=_NAMES_PER_READ, tenant=tenant)
        while found := self.names(page):
            yield from found
            page = replace(page, after=found[-1])

    def count(self, tenant: str = DEFAULT_TENANT) -> int:
        """How many speakers the tenant has; reads an index once through."""
        with self.database.read() as db:
            return speakers.count(db, tenant)

    def speaker_embedding(self, record: SpeakerRecord) -> tuple[float, ...] | None:
        """The registered embedding, float32 values of shape ``(embedding_dim,)``.

        None if the speaker has audio, or was replaced or deleted in the meantime.
        """
        with self.database.read() as db:
            return speakers.embedding(db, record.generation)

    def usage(self) -> dict[Segment, dict[str, Usage]]:
        """What each segment holds, as ``audio`` and ``encodings``; reads four rows."""
        with self.database.read() as db:
            return {
                segment: {
                    "audio": stored_files.used(db, segment, is_audio=True),
                    "encodings": stored_files.used(db, segment, is_audio=False),
                }
                for segment in Segment
            }

    def num_unfinished_deletions(self) -> int:
        """How many deletions have something left, somewhere."""
        with self.database.read() as db:
            return deletions.num_unfinished(db)

    def progress(
        self, name: str, tenant: str = DEFAULT_TENANT
    ) -> DeletionProgress | None:
        """How far the last deletion of that name is; None if nothing is known."""
        if not is_storable(name):
            return None
        with self.database.read() as db:
            return deletions.of_name(db, deletions.name_hash(tenant, fold(name)))

    def imported_files(self) -> dict[str, tuple[int, int]]:
        """Stock's files that were looked at: name -> (mtime in ns, bytes)."""
        with self.database.read() as db:
            return imports.known(db)

    def import_refusal(self, name: str, created_at: float) -> str | None:
        """Why a file's speaker is not imported whatever the policy; None if it may."""
        with self.database.read() as db:
            return imports.refusal(db, fold(name), created_at, "overwrite")

    def remember_files(self, files: list[ImportedFile]) -> None:
        """Do not look at these files of stock's again, unless they change."""
        with self.database.write() as db:
            for file in files:
                imports.remember(db, file)

    def verify(self) -> list[str]:
        """What is wrong with the file or its rows, one line each; reads it all."""
        with self.database.snapshot() as db:
            return [
                *dialect.problems(db),
                *speakers.problems(db),
                *stored_files.usage_problems(db),
            ]

    def close(self) -> None:
        """Close every connection; using the catalogue afterwards is an error."""
        self.database.close()


def open_catalogue(directory: Path) -> Catalogue:
    """Make or migrate the catalogue of a directory that exists.

    Raises: StorageError.
    """
    database = Database(directory / FILE_NAME)
    database.prepare()
    return Catalogue(database)


def open_existing_catalogue(directory: Path) -> Catalogue:
    """Open a catalogue of this version that exists; writes nothing.

    Raises: StorageError.
    """
    database = Database(directory / FILE_NAME)
    database.check()
    return Catalogue(database)


__all__ = ["FILE_NAME", "Catalogue", "open_catalogue", "open_existing_catalogue"]
