"""Rows of the table ``imported_file``: what is known about stock's voice files."""

import sqlite3
import time
from dataclasses import dataclass

from vllm_tts_cache.catalogue.record import DEFAULT_TENANT
from vllm_tts_cache.config import RegistrationPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedFile:
    """A file that was looked at; another time or size makes it another file.

    Attributes:
        file_name: Its name in the directory.
        mtime_ns: When its content last changed.
        size: Its length in bytes.
        name_key: Folded name of the voice in it; empty if there is none.
        created_at: When stock registered the voice, in Unix seconds.
    """

    file_name: str
    mtime_ns: int
    size: int
    name_key: str = ""
    created_at: float = 0.0


def known(db: sqlite3.Connection) -> dict[str, tuple[int, int]]:
    """All files that were looked at: name -> (mtime_ns, size)."""
    query = "SELECT file_name, mtime_ns, size FROM imported_file"
    return {name: (mtime_ns, size) for name, mtime_ns, size in db.execute(query)}


def remember(db: sqlite3.Connection, file: ImportedFile) -> None:
    """Insert or update the file's row; its voice stays deleted."""
    db.execute(
        """
        INSERT INTO imported_file (file_name, mtime_ns, size, name_key, created_at)
            VALUES (?, ?, ?, ?, ?)
        ON CONFLICT (file_name) DO UPDATE SET
            mtime_ns = excluded.mtime_ns, size = excluded.size,
            name_key = excluded.name_key, created_at = excluded.created_at,
            deleted_at = iif(
                imported_file.name_key = excluded.name_key,
                imported_file.deleted_at,
                NULL
            )
        """,
        (file.file_name, file.mtime_ns, file.size, file.name_key, file.created_at),
    )


def mark_deleted(db: sqlite3.Connection, name_key: str) -> None:
    """Remember that a voice was deleted, as long as stock's files of it are known.

    Kept with the files rather than as a row per deletion: servers that register and
    delete names all day would collect those without end.
    """
    # Stock dates a voice up to some seconds ahead of the clock.
    db.execute(
        "UPDATE imported_file SET deleted_at = max(?, created_at) WHERE name_key = ?",
        (time.time(), name_key),
    )


def refusal(
    db: sqlite3.Connection,
    name_key: str,
    created_at: float,
    policy: RegistrationPolicy,
) -> str | None:
    """Why a voice of this name and age is not imported, None if it is."""
    query = "SELECT max(deleted_at) FROM imported_file WHERE name_key = ?"
    (deleted_at,) = db.execute(query, (name_key,)).fetchone()
    if deleted_at is not None and created_at <= deleted_at:
        return "the voice was deleted after the file was written"
    query = "SELECT created_at FROM speaker WHERE tenant = ? AND name_key = ?"
    row = db.execute(query, (DEFAULT_TENANT, name_key)).fetchone()
    if row is None:
        return None
    if row[0] >= created_at:
        return "the registered voice of this name is as new or newer"
    if policy == "immutable":
        return "the name is registered and the registration policy is 'immutable'"
    return None
