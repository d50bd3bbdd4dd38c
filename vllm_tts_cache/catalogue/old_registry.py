"""Reading the registry of the version before this catalogue: ``registry.sqlite3``."""

import sqlite3
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from vllm_tts_cache.catalogue import dialect, imports, speakers, sqlite
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.imports import ImportedFile
from vllm_tts_cache.errors import StorageError

FILE_NAME = "registry.sqlite3"

# The one schema that it ever had.
_VERSION = 1
_PER_BATCH = 1000
_BUSY_SECONDS = 10.0


def take_over(path: Path, database: Database) -> int:
    """Copy its rows into the catalogue; return how many speakers were new there.

    Generations stay what they were, and none that was ever used is used again. A name
    that the catalogue has already stays as it is there.

    Raises:
        StorageError: The registry cannot be read; it may be copied in part.
    """
    num_new = 0
    with sqlite.errors(path), _opened(path) as old:
        if old is None:
            return 0
        for batch in _batches(old, "SELECT * FROM speaker ORDER BY generation"):
            with database.write() as db:
                num_new += speakers.take_over(db, batch)
        for batch in _batches(old, "SELECT * FROM imported_file"):
            with database.write() as db:
                for row in batch:
                    imports.take_over(db, _file(row), row["deleted_at"])
        query = "SELECT seq FROM sqlite_sequence WHERE name = 'speaker'"
        if (last := old.execute(query).fetchone()) is not None:
            with database.write() as db:
                dialect.raise_sequence(db, "speaker", "generation", last[0])
    return num_new


@contextmanager
def _opened(path: Path) -> Generator[sqlite3.Connection | None, None, None]:
    if not path.is_file():
        yield None
        return
    with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS)) as old:
        (version,) = old.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise StorageError(
                f"The voice registry {path} has schema {version}, and this "
                f"vllm-tts-cache takes over {_VERSION}. Use the version that wrote it."
            )
        old.row_factory = sqlite3.Row
        # Else what the log alone says would be lost with the log, should this process
        # die between removing one file and the other.
        with suppress(sqlite3.OperationalError):
            old.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        yield old if version else None


def _batches(old: sqlite3.Connection, query: str) -> Iterator[list[dict[str, Any]]]:
    rows = old.execute(query)
    while batch := rows.fetchmany(_PER_BATCH):
        yield [dict(row) for row in batch]


def _file(row: dict[str, Any]) -> ImportedFile:
    return ImportedFile(
        file_name=row["file_name"],
        mtime_ns=row["mtime_ns"],
        size=row["size"],
        name_key=row["name_key"] or "",
        created_at=row["created_at"] or 0.0,
    )
