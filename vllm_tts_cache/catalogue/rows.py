"""Rows of the table ``speaker``; the caller provides connection and transaction."""

import sqlite3
import time
from dataclasses import asdict, dataclass
from typing import Any

from vllm_tts_cache.catalogue.names import fold
from vllm_tts_cache.catalogue.record import (
    NewSpeaker,
    SpeakerRecord,
    pack_embedding,
    unpack_embedding,
)

# In the order of SpeakerRecord's fields. length() does not read the embedding.
_SELECT = """
    SELECT tenant, name, name_key, generation, audio_sha256, num_samples,
        sample_rate_hz, ref_text, consent, description, length(embedding) / 4,
        mime_type, original_filename, file_size, created_at
    FROM speaker
"""
_FIELDS = tuple(SpeakerRecord.__dataclass_fields__)
_SELECT_NAMES = "SELECT name, name_key FROM speaker"

# instr rather than LIKE: the keys are folded, and nothing needs escaping.
_ON_PAGE = """
    WHERE tenant = :tenant AND name_key > :after
        AND (:search = '' OR instr(name_key, :search) > 0)
    ORDER BY name_key LIMIT :limit
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Which rows, in the order of their keys: a tenant's, behind ``after``.

    Attributes:
        search: What the key contains; folded, as ``after`` is.
    """

    tenant: str
    after: str
    search: str = ""
    limit: int


def find(db: sqlite3.Connection, tenant: str, name_key: str) -> SpeakerRecord | None:
    """The row of one name."""
    where = " WHERE tenant = ? AND name_key = ?"
    row = db.execute(_SELECT + where, (tenant, name_key)).fetchone()
    return None if row is None else _record(row)


def page(db: sqlite3.Connection, where: Page) -> list[SpeakerRecord]:
    """One page of rows."""
    return [_record(row) for row in db.execute(_SELECT + _ON_PAGE, asdict(where))]


def names(db: sqlite3.Connection, where: Page) -> list[tuple[str, str]]:
    """The same page as (name, name_key)."""
    return db.execute(_SELECT_NAMES + _ON_PAGE, asdict(where)).fetchall()


def replace(db: sqlite3.Connection, new: NewSpeaker) -> SpeakerRecord:
    """Put the row in the place of the one that has its name, if there is one."""
    delete(db, new.tenant, new.name_key)
    values: dict[str, Any] = {field: getattr(new, field) for field in _GIVEN}
    values["name_key"] = new.name_key
    values["embedding"] = pack_embedding(new.embedding) if new.embedding else None
    values["created_at"] = time.time() if new.created_at is None else new.created_at
    db.execute(_INSERT, values)
    record = find(db, new.tenant, new.name_key)
    assert record is not None  # inserted above, in this transaction
    return record


_GIVEN = tuple(NewSpeaker.__dataclass_fields__)
_INSERT = """
    INSERT INTO speaker (
        tenant, name_key, name, audio_sha256, num_samples, sample_rate_hz, ref_text,
        consent, description, mime_type, original_filename, file_size, created_at,
        embedding
    ) VALUES (
        :tenant, :name_key, :name, :audio_sha256, :num_samples, :sample_rate_hz,
        :ref_text, :consent, :description, :mime_type, :original_filename,
        :file_size, :created_at, :embedding
    )
"""


def delete(db: sqlite3.Connection, tenant: str, name_key: str) -> None:
    """Remove the row of one name, if there is one."""
    where = (tenant, name_key)
    db.execute("DELETE FROM speaker WHERE tenant = ? AND name_key = ?", where)


def at_least(db: sqlite3.Connection, num_rows: int) -> bool:
    """Whether there are so many rows, all tenants together; counts no further."""
    some = "SELECT count(*) FROM (SELECT 1 FROM speaker LIMIT ?)"
    return db.execute(some, (num_rows,)).fetchone()[0] >= num_rows


def embedding(db: sqlite3.Connection, generation: int) -> tuple[float, ...] | None:
    """The embedding that was registered, None if there is none or no such row."""
    query = "SELECT embedding FROM speaker WHERE generation = ?"
    row = db.execute(query, (generation,)).fetchone()
    return None if row is None or row[0] is None else unpack_embedding(row[0])


def problems(db: sqlite3.Connection) -> list[str]:
    """What is wrong with the file or with its rows; empty if nothing is."""
    found = [line for (line,) in db.execute("PRAGMA integrity_check") if line != "ok"]
    query = "SELECT generation, name, name_key, audio_sha256, embedding FROM speaker"
    for generation, name, name_key, audio_sha256, blob in db.execute(query):
        if (audio_sha256 is None) == (blob is None):
            found.append(
                f"speaker {name!r} ({generation}): not one of audio, embedding"
            )
        if name_key != fold(name):
            found.append(f"speaker {name!r} ({generation}): its key is {name_key!r}")
    return found


def _record(row: tuple[Any, ...]) -> SpeakerRecord:
    return SpeakerRecord(**dict(zip(_FIELDS, row, strict=True)))
