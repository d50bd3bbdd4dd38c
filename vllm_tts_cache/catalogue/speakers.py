"""Rows of the table ``speaker``; the caller provides connection and transaction."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import (
    Connection,
    Integer,
    Select,
    bindparam,
    func,
    literal_column,
    select,
)

from vllm_tts_cache.catalogue import dialect
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.names import fold, is_storable
from vllm_tts_cache.catalogue.record import (
    DEFAULT_TENANT,
    NewSpeaker,
    SpeakerRecord,
    pack_embedding,
    unpack_embedding,
)
from vllm_tts_cache.catalogue.schema import slices, speaker, stored_file
from vllm_tts_cache.errors import InvalidSpeakerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Which speakers are listed, in the order of their folded names.

    Attributes:
        limit: Speakers at most; positive.
        after: A name; the page begins behind it, registered or not.
        search: Only names that contain this, both folded.
        tenant: Whose speakers.
    """

    limit: int
    after: str = ""
    search: str = ""
    tenant: str = DEFAULT_TENANT


_FIELDS = tuple(field.name for field in fields(SpeakerRecord))
_GIVEN = tuple(field.name for field in fields(NewSpeaker))

# The length does not read the embedding.
_embedding_dim = func.length(speaker.c.embedding, type_=Integer) // literal_column(
    "4", Integer
)
_COLUMNS = [
    _embedding_dim if field == "embedding_dim" else speaker.c[field]
    for field in _FIELDS
]
_IS_NAMED = (speaker.c.tenant == bindparam("tenant")) & (
    speaker.c.name_key == bindparam("name_key")
)
_FIND = select(*_COLUMNS).where(_IS_NAMED)
# One row, however many files: building a row takes as long as finding it.
_kinds = (
    select(dialect.joined(stored_file.c.kind))
    .where(stored_file.c.audio_sha256 == speaker.c.audio_sha256)
    .scalar_subquery()
)
_FIND_WITH_KINDS = select(*_COLUMNS, _kinds).where(_IS_NAMED)


def find(db: Connection, tenant: str, name_key: str) -> SpeakerRecord | None:
    """The row of one name."""
    row = db.execute(_FIND, {"tenant": tenant, "name_key": name_key}).first()
    return None if row is None else _record(row)


def find_with_kinds(
    db: Database, tenant: str, name_key: str
) -> tuple[SpeakerRecord, list[str]] | None:
    """The row of one name, and the kinds of files stored for its audio, at once."""
    where = {"tenant": tenant, "name_key": name_key}
    if (row := db.first_at_once(_FIND_WITH_KINDS, where)) is None:
        return None
    kinds: str = row[-1] or ""
    return _record(row[:-1]), kinds.split()


def records(db: Connection, page: Page) -> list[SpeakerRecord]:
    """The rows of a page.

    Raises:
        InvalidSpeakerError: ``limit`` is not positive, or a text is no text.
    """
    return [_record(row) for row in db.execute(_on_page(select(*_COLUMNS), page))]


def names(db: Connection, page: Page) -> list[str]:
    """The names of the same page, for less."""
    return list(db.execute(_on_page(select(speaker.c.name), page)).scalars())


def replace(db: Connection, new: NewSpeaker) -> SpeakerRecord:
    """Put the row in the place of the one that has its name, if there is one."""
    delete(db, new.tenant, new.name_key)
    values: dict[str, Any] = {field: getattr(new, field) for field in _GIVEN}
    values["name_key"] = new.name_key
    values["embedding"] = pack_embedding(new.embedding) if new.embedding else None
    values["created_at"] = time.time() if new.created_at is None else new.created_at
    db.execute(speaker.insert(), values)
    record = find(db, new.tenant, new.name_key)
    assert record is not None  # inserted above, in this transaction
    return record


def take_over(db: Connection, rows: Sequence[dict[str, Any]]) -> int:
    """Insert rows of an earlier version; return how many were not there yet.

    Their generations stay theirs, but where another speaker has the number.
    """
    keys = speaker.c.tenant, speaker.c.name_key
    names = [row["name_key"] for row in rows]
    numbers = [row["generation"] for row in rows]
    known = {
        tuple(row)
        for some in slices(names)
        for row in db.execute(select(*keys).where(speaker.c.name_key.in_(some)))
    }
    number = speaker.c.generation
    taken = {
        row[0]
        for some in slices(numbers)
        for row in db.execute(select(number).where(number.in_(some)))
    }
    new = [row for row in rows if (row["tenant"], row["name_key"]) not in known]
    for row in new:
        if row["generation"] in taken:
            db.execute(speaker.insert(), row | {"generation": None})
    if kept := [row for row in new if row["generation"] not in taken]:
        db.execute(speaker.insert(), kept)
    return len(new)


def delete(db: Connection, tenant: str, name_key: str) -> None:
    """Remove the row of one name, if there is one."""
    db.execute(
        speaker.delete().where(_IS_NAMED), {"tenant": tenant, "name_key": name_key}
    )


def is_referenced(db: Connection, audio_sha256: str) -> bool:
    """Whether a speaker of any tenant has this audio."""
    query = select(1).where(speaker.c.audio_sha256 == audio_sha256).limit(1)
    return db.execute(query).first() is not None


def referenced(db: Connection, audio_sha256s: Sequence[str]) -> set[str]:
    """Those of the addresses that a speaker of any tenant has."""
    column = speaker.c.audio_sha256
    return {
        sha
        for some in slices(audio_sha256s)
        for sha in db.execute(select(column).where(column.in_(some))).scalars()
    }


def audio_between(db: Connection, first: str, last: str) -> set[str]:
    """The addresses that some speaker has, from ``first`` to before ``last``."""
    column = speaker.c.audio_sha256
    return set(
        db.execute(select(column).where(column >= first, column < last)).scalars()
    )


def audio_prefixes(db: Connection) -> set[str]:
    """The first two digits of the addresses that speakers have."""
    column = speaker.c.audio_sha256
    query = select(func.substr(column, 1, 2)).where(column.is_not(None)).distinct()
    return set(db.execute(query).scalars())


def at_least(db: Connection, num_rows: int) -> bool:
    """Whether there are so many rows, all tenants together; counts no further."""
    some = select(speaker.c.generation).limit(num_rows).subquery()
    return db.execute(select(func.count()).select_from(some)).scalar_one() >= num_rows


def count(db: Connection, tenant: str) -> int:
    """How many rows the tenant has; reads an index once through."""
    query = select(func.count()).where(speaker.c.tenant == tenant)
    return db.execute(query).scalar_one()


def embedding(db: Connection, generation: int) -> tuple[float, ...] | None:
    """The embedding that was registered, None if there is none or no such row."""
    query = select(speaker.c.embedding).where(speaker.c.generation == generation)
    blob = db.execute(query).scalar()
    return None if blob is None else unpack_embedding(blob)


def problems(db: Connection) -> list[str]:
    """What is wrong with the rows; empty if nothing is."""
    found: list[str] = []
    query = select(speaker.c.generation, speaker.c.name, speaker.c.name_key)
    for generation, name, name_key in db.execute(query):
        if name_key != fold(name):
            found.append(f"speaker {name!r} ({generation}): its key is {name_key!r}")
    return found


def _on_page(query: Select[Any], page: Page) -> Select[Any]:
    if page.limit <= 0:
        raise InvalidSpeakerError("limit", "it must be positive")
    for field, text in (("after", page.after), ("search", page.search)):
        if not is_storable(text):
            raise InvalidSpeakerError(field, "it contains an unpaired surrogate")
    key = speaker.c.name_key
    query = query.where(speaker.c.tenant == page.tenant, key > fold(page.after))
    if part := fold(page.search):
        query = query.where(dialect.contains(key, part))
    return query.order_by(key).limit(page.limit)


def _record(row: Sequence[Any]) -> SpeakerRecord:
    return SpeakerRecord(**dict(zip(_FIELDS, row, strict=True)))
