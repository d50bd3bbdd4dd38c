"""Rows of the table ``speaker``; the caller provides connection and transaction."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Select,
    bindparam,
    func,
    literal_column,
    select,
    text,
)

from vllm_tts_cache.catalogue import dialect, tenant_usage
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.details import labels_to_json
from vllm_tts_cache.catalogue.ids import is_voice_id, new_voice_id
from vllm_tts_cache.catalogue.names import fold, search_text
from vllm_tts_cache.catalogue.record import (
    NewSpeaker,
    SpeakerRecord,
    pack_embedding,
    unpack_embedding,
)
from vllm_tts_cache.catalogue.schema import (
    slices,
    speaker,
    speaker_label,
    stored_file,
    tenant_encoding,
)
from vllm_tts_cache.catalogue.stored_files import IS_NO_PREVIEW

_FIELDS = tuple(field.name for field in fields(SpeakerRecord))
_NOT_A_COLUMN = ("labels", "clip_starts")
_GIVEN = tuple(f.name for f in fields(NewSpeaker) if f.name not in _NOT_A_COLUMN)

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
_HAS_ID = (speaker.c.tenant == bindparam("tenant")) & (
    speaker.c.speaker_id == bindparam("speaker_id")
)
# One row, however many files: building a row takes as long as finding it.
_kinds = (
    select(dialect.joined(stored_file.c.kind))
    .where(
        stored_file.c.audio_sha256 == speaker.c.audio_sha256,
        IS_NO_PREVIEW,
    )
    .scalar_subquery()
)
_FIND_WITH_KINDS = select(*_COLUMNS, _kinds)
# The same, of those that the speaker's tenant was told of: see `tenant_encodings`.
_told_kinds = (
    select(dialect.joined(stored_file.c.kind))
    .select_from(stored_file)
    .join(
        tenant_encoding,
        (tenant_encoding.c.audio_sha256 == stored_file.c.audio_sha256)
        & (tenant_encoding.c.kind == stored_file.c.kind),
    )
    .where(
        stored_file.c.audio_sha256 == speaker.c.audio_sha256,
        tenant_encoding.c.tenant == speaker.c.tenant,
        tenant_encoding.c.is_told == literal_column("1"),
        IS_NO_PREVIEW,
    )
    .correlate(speaker)
    .scalar_subquery()
)
_FIND_WITH_TOLD_KINDS = select(*_COLUMNS, _told_kinds)
# As literal text: a parameter could not use the index, which is of these rows only.
_IS_PINNED = text("is_pinned = 1")
_PINNED = (
    select(speaker.c.audio_sha256)
    .where(_IS_PINNED, speaker.c.audio_sha256.is_not(None))
    .distinct()
)
_EXPIRED = (
    select(speaker.c.generation)
    .where(speaker.c.expires_at <= bindparam("now"))
    .limit(1)
)
_WITH_KINDS = tuple(_FIND_WITH_KINDS.where(where) for where in (_IS_NAMED, _HAS_ID))
_WITH_TOLD_KINDS = tuple(
    _FIND_WITH_TOLD_KINDS.where(where) for where in (_IS_NAMED, _HAS_ID)
)
_Key = tuple["ColumnElement[bool]", dict[str, str]]


def find(db: Connection, tenant: str, name: str) -> SpeakerRecord | None:
    """The row of a name or an id; a name is compared folded."""
    for condition, where in _keys(tenant, name):
        row = db.execute(select(*_COLUMNS).where(condition), where).first()
        if row is not None:
            return of_row(row)
    return None


def find_with_kinds(
    db: Database, tenant: str, name: str, *, told_only: bool = False
) -> tuple[SpeakerRecord, list[str]] | None:
    """The row of a name or id, and the kinds of files stored for its audio, at once.

    With ``told_only`` only those encodings that the tenant was told of.
    """
    queries = _WITH_TOLD_KINDS if told_only else _WITH_KINDS
    for condition, where in _keys(tenant, name):
        row = db.first_at_once(queries[condition is _HAS_ID], where)
        if row is not None:
            kinds: str = row[-1] or ""
            return of_row(row[:-1]), kinds.split()
    return None


def replace(
    db: Connection, new: NewSpeaker, consent_id: str | None = None
) -> SpeakerRecord:
    """Put the row in the place of the one that has its name, if there is one.

    What is put there keeps the id. That its tenant owns its audio is for whoever stores
    that, and knows its bytes.
    """
    old = find_named(db, new.tenant, new.name_key)
    if old is not None:
        delete(db, old)
    values: dict[str, Any] = {field: getattr(new, field) for field in _GIVEN}
    values["name_key"] = new.name_key
    values["speaker_id"] = new_voice_id() if old is None else old.speaker_id
    values["consent_id"] = consent_id
    values["labels_json"] = labels_to_json(new.labels)
    values["clip_starts_json"] = new.clip_starts_json
    values["search_text"] = _searched(new.name, new.description, new.labels)
    values["embedding"] = pack_embedding(new.embedding) if new.embedding else None
    values["is_pinned"] = int(new.is_pinned)
    is_dated = new.created_at is not None
    values["created_at"] = new.created_at if is_dated else dialect.now(db)
    db.execute(speaker.insert(), values)
    tenant_usage.count(db, new.tenant, voices=1, pinned=values["is_pinned"])
    record = find_named(db, new.tenant, new.name_key)
    assert record is not None  # inserted above, in this transaction
    _label(db, record)
    return record


def change(
    db: Connection,
    before: SpeakerRecord,
    record: SpeakerRecord,
    values: Mapping[str, Any],
) -> None:
    """Write the columns that are new, of a record that has been changed already."""
    searched = _searched(record.name, record.description, record.labels)
    where = speaker.c.generation == record.generation
    new = {**values, "search_text": searched}
    if "is_pinned" in new:
        new["is_pinned"] = int(new["is_pinned"])
    db.execute(speaker.update().where(where).values(**new))
    if pinned := int(record.is_pinned) - int(before.is_pinned):
        tenant_usage.count(db, record.tenant, pinned=pinned)
    _label(db, record)


def take_over(db: Connection, rows: Sequence[dict[str, Any]]) -> int:
    """Insert rows of an earlier version; return how many were not there yet.

    Their generations stay theirs, but where another speaker has the number. What
    tenants have is to be counted anew when their files have been taken over as well.
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
    new = [
        row
        | {
            "speaker_id": new_voice_id(),
            "search_text": search_text(row["name"], row["description"]),
        }
        for row in rows
        if (row["tenant"], row["name_key"]) not in known
    ]
    for row in new:
        if row["generation"] in taken:
            renumbered = {k: v for k, v in row.items() if k != "generation"}
            db.execute(speaker.insert(), renumbered)
    if kept := [row for row in new if row["generation"] not in taken]:
        db.execute(speaker.insert(), kept)
        # A sequence of PostgreSQL does not see the numbers that it did not give.
        newest = max(int(row["generation"]) for row in kept)
        dialect.raise_sequence(db, "speaker", "generation", newest)
    return len(new)


def find_named(db: Connection, tenant: str, name_key: str) -> SpeakerRecord | None:
    """The row of a folded name."""
    where = {"tenant": tenant, "name_key": name_key}
    row = db.execute(select(*_COLUMNS).where(_IS_NAMED), where).first()
    return None if row is None else of_row(row)


def delete(db: Connection, record: SpeakerRecord) -> None:
    """Remove a row and its labels."""
    number = record.generation
    db.execute(speaker_label.delete().where(speaker_label.c.generation == number))
    db.execute(speaker.delete().where(speaker.c.generation == number))
    tenant = record.tenant
    tenant_usage.count(db, tenant, voices=-1, pinned=-int(record.is_pinned))
    if record.audio_sha256 is not None:
        tenant_usage.disown(db, tenant, record.audio_sha256)


def expired(db: Connection, now: float, limit: int) -> list[SpeakerRecord]:
    """Speakers whose end has come, those that wait longest first."""
    query = select(*_COLUMNS).where(speaker.c.expires_at <= now)
    rows = db.execute(query.order_by(speaker.c.expires_at).limit(limit))
    return [of_row(row) for row in rows]


def pinned_audio(db: Connection) -> frozenset[str]:
    """The addresses of pinned speakers; there are few, and an index of them."""
    return frozenset(db.execute(_PINNED).scalars())


def num_pinned(db: Connection) -> int:
    """How many speakers are pinned, all tenants together."""
    query = select(func.count()).select_from(speaker)
    return db.execute(query.where(_IS_PINNED)).scalar_one()


def have_expired(db: Connection, now: float) -> bool:
    """Whether there is such a speaker; asked every second, by an index."""
    return db.execute(_EXPIRED, {"now": now}).first() is not None


def standing_on(db: Connection, consent_id: str, limit: int) -> list[tuple[str, str]]:
    """Ids and names of speakers that a consent recording is of, some of them."""
    columns = speaker.c.speaker_id, speaker.c.name
    query = select(*columns).where(speaker.c.consent_id == consent_id)
    rows = db.execute(query.order_by(speaker.c.name_key).limit(limit))
    return [(id_, name) for id_, name in rows]


def at_least(db: Connection, num_rows: int) -> bool:
    """Whether there are so many rows, all tenants together; counts no further."""
    some = select(speaker.c.generation).limit(num_rows).subquery()
    return db.execute(select(func.count()).select_from(some)).scalar_one() >= num_rows


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


def record_columns() -> "Select[Any]":
    """A query for whole records; see `of_row`."""
    return select(*_COLUMNS)


def of_row(row: Sequence[Any]) -> SpeakerRecord:
    """What a row of `record_columns` says."""
    values = dict(zip(_FIELDS, row, strict=True))
    values["is_pinned"] = bool(values["is_pinned"])
    return SpeakerRecord(**values)


def _keys(tenant: str, name: str) -> Iterator[_Key]:
    """What to look a text up by: an id first; what was called so before, as a name."""
    name = name.strip()
    if is_voice_id(name):
        yield _HAS_ID, {"tenant": tenant, "speaker_id": name}
    yield _IS_NAMED, {"tenant": tenant, "name_key": fold(name)}


def _label(db: Connection, record: SpeakerRecord) -> None:
    number = record.generation
    db.execute(speaker_label.delete().where(speaker_label.c.generation == number))
    rows = [
        {
            "generation": number,
            "label_key": fold(key),
            "label_value": fold(value),
            "tenant": record.tenant,
            "name_key": record.name_key,
            "created_at": record.created_at,
        }
        for key, value in record.labels.items()
    ]
    if rows:
        db.execute(speaker_label.insert(), rows)


def _searched(name: str, description: str | None, labels: Mapping[str, str]) -> str:
    return search_text(name, description, *labels.values())
