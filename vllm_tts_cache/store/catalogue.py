"""The catalogue as its readers see it: what is registered, stored and being deleted."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from vllm_tts_cache.catalogue import (
    deletions,
    owners,
    pages,
    schema,
    speakers,
    sqlite,
    stored_files,
)
from vllm_tts_cache.catalogue.database import Backend, Database
from vllm_tts_cache.catalogue.names import fold
from vllm_tts_cache.catalogue.owners import TenantUsage
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.records import DEFAULT_TENANT, Segment, SpeakerRecord
from vllm_tts_cache.catalogue.stored_files import Usage
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.files import shared_file_system
from vllm_tts_cache.store import stock_files
from vllm_tts_cache.store.stock_files import ImportedFile

logger = logging.getLogger("vllm.vllm_tts_cache")

FILE_NAME = "catalogue.sqlite3"

_NAMES_PER_READ = 1000


class Catalogue:
    """Queries over one database; any thread may ask.

    Every method raises StorageError if the database fails. Writing is for the
    store, which owns the files as well: see `store.speaker_store`.

    Args:
        database: The catalogue's.
        directory: ``SPEAKER_SAMPLES_DIR``, of whose files it tells.

    Attributes:
        database: Lends connections.
        is_local: Whether only this host has the file, so that a look takes
            microseconds and may be taken on an event loop.
        path: The SQLite file, if it is one.
    """

    def __init__(self, database: Database, directory: Path):
        self.database = database
        self.path = directory / FILE_NAME
        is_file = isinstance(database.backend, sqlite.SqliteFile)
        kind = shared_file_system(directory) if is_file else None
        self.is_local = is_file and kind is None
        if kind is not None:
            logger.warning(
                "SPEAKER_SAMPLES_DIR=%s is on %s. The catalogue needs one host and a "
                "local file system: SQLite's log is shared through memory. Do not "
                "start a second host on it, or keep the catalogue on PostgreSQL "
                "(SPEAKER_CATALOGUE_URL).",
                directory,
                kind,
            )

    def importing(self) -> AbstractContextManager[None]:
        """The turn to import files of stock's, among those that have the directory."""
        return sqlite.opening_lock(self.path)

    def records(self, page: Page) -> list[SpeakerRecord]:
        """The speakers of a page, or its first ones if they are too much.

        Only a page without any is certainly the last.

        Raises:
            InvalidSpeakerError: The cursor is none.
        """
        with self.database.read() as db:
            return pages.records(db, page)

    def names(self, page: Page) -> list[str]:
        """The names of the same page, for less."""
        with self.database.read() as db:
            return pages.names(db, page)

    def iter_names(self, tenant: str = DEFAULT_TENANT) -> Iterator[str]:
        """All names in order; holds no connection while the caller thinks.

        A speaker that comes or goes meanwhile may or may not be among them.
        """
        page = Page(limit=_NAMES_PER_READ, tenant=tenant)
        while found := self.names(page):
            yield from found
            page = replace(page, after=found[-1])

    def last_used(self, limit: int) -> list[tuple[str, str]]:
        """Tenants and names of the speakers that spoke last, the last one first."""
        with self.database.read() as db:
            return stored_files.last_used_speakers(db, limit)

    def count(self) -> int:
        """How many speakers all tenants have together; reads a row for each tenant."""
        with self.database.read() as db:
            return owners.num_voices(db)

    def usage_of(self, tenant: str) -> TenantUsage:
        """What a tenant has; reads a row."""
        with self.database.read() as db:
            return owners.of_tenant(db, tenant)

    def usage_of_tenants(self) -> dict[str, TenantUsage]:
        """What each tenant has."""
        with self.database.read() as db:
            return owners.of_all(db)

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

    def num_unfinished_deletions(self, tenant: str | None = None) -> int:
        """How many deletions, of all or of a tenant, have something left, somewhere."""
        with self.database.read() as db:
            return deletions.num_unfinished(db, tenant)

    def imported_files(self) -> dict[str, tuple[int, int]]:
        """Stock's files that were looked at: name -> (mtime in ns, bytes)."""
        with self.database.read() as db:
            return stock_files.known(db)

    def import_refusal(self, name: str, created_at: float) -> str | None:
        """Why a file's speaker is not imported whatever the policy; None if it may."""
        with self.database.read() as db:
            return stock_files.refusal(db, fold(name), created_at, "overwrite")

    def remember_files(self, files: list[ImportedFile]) -> None:
        """Do not look at these files of stock's again, unless they change."""
        with self.database.write() as db:
            for file in files:
                stock_files.remember(db, file)

    def verify(self) -> list[str]:
        """What is wrong with the file or its rows, one line each; reads it all."""
        with self.database.snapshot() as db:
            return [
                *schema.problems(db),
                *speakers.problems(db),
                *stored_files.usage_problems(db),
                *owners.problems(db),
            ]

    def close(self) -> None:
        """Close every connection; using the catalogue afterwards is an error."""
        self.database.close()


def open_catalogue(directory: Path, url: str = "") -> Catalogue:
    """Open the catalogue of a directory that exists, and make it if there is none.

    Args:
        directory: Where the files are that it tells of.
        url: Of a PostgreSQL database; empty for a file in the directory.

    Raises: StorageError, ConfigError.
    """
    return _opened(directory, url, Database.prepare)


def open_existing_catalogue(directory: Path, url: str = "") -> Catalogue:
    """Open a catalogue of this version that exists; writes nothing.

    Raises: StorageError, ConfigError.
    """
    return _opened(directory, url, Database.check)


def _opened(
    directory: Path, url: str, prepare: Callable[[Database], None]
) -> Catalogue:
    database = Database(_backend(directory, url))
    try:
        prepare(database)
    except BaseException:
        database.close()
        raise
    return Catalogue(database, directory)


def _backend(directory: Path, url: str) -> Backend:
    if not url:
        return sqlite.SqliteFile(directory / FILE_NAME)
    try:
        from vllm_tts_cache.catalogue.postgres import PostgresServer
    except ImportError as exc:
        raise ConfigError(
            "SPEAKER_CATALOGUE_URL is set, and the driver is missing: "
            f"pip install 'vllm-tts-cache[fleet]' ({exc})"
        ) from exc
    return PostgresServer(url)


__all__ = ["FILE_NAME", "Catalogue", "open_catalogue", "open_existing_catalogue"]
