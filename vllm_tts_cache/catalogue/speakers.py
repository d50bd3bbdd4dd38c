"""Rows of the table ``speaker``; the caller provides connection and transaction."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

from sqlalchemy import (
    Connection,
    Integer,
    Text,
    bindparam,
    func,
    literal_column,
    select,
)

from vllm_tts_cache.catalogue import owners, schema
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.names import (
    VOICE_PREFIX,
    fold,
    keys_of,
    new_id,
    search_text,
)
from vllm_tts_cache.catalogue.records import (
    Identity,
    NewSpeaker,
    SpeakerRecord,
    labels_to_json,
    pack_embedding,
    unpack_embedding,
)
from vllm_tts_cache.catalogue.schema import speaker, speaker_label, stored_file

_FIELDS = tuple(field.name for field in fields(SpeakerRecord))
_NOT_A_COLUMN = ("labels", "clip_starts", "identity")
_GIVEN = tuple(f.name for f in fields(NewSpeaker) if f.name not in _NOT_A_COLUMN)

# The length does not read the embedding.
_embedding_dim = func.length(speaker.c.embedding, type_=Integer) // literal_column(
    "4", Integer
)
# Whole records; see `of_row`.
RECORDS = select(
    *(
        _embedding_dim if field == "embedding_dim" else speaker.c[field]
        for field in _FIELDS
    )
)
_IS_NAMED = (speaker.c.tenant == bindparam("tenant")) & (
    speaker.c.name_key == bindparam("name_key")
)
_HAS_ID = (speaker.c.tenant == bindparam("tenant")) & (
    speaker.c.speaker_id == bindparam("speaker_id")
)
_SPACE = cast(Any, literal_column("' '", Text))  # rendered once, unlike a text
# One row, however many files: building a row takes as long as finding it.
_kinds = (
    select(func.aggregate_strings(stored_file.c.kind, _SPACE))
    .where(stored_file.c.audio_sha256 == speaker.c.audio_sha256)
    .scalar_subquery()
)
_EXPIRED = (
    select(speaker.c.generation)
    .where(speaker.c.expires_at <= bindparam("now"))
    .limit(1)
)
_IS = {"name_key": _IS_NAMED, "speaker_id": _HAS_ID}
_WITH_KINDS = {
    column: RECORDS.add_columns(_kinds).where(where) for column, where in _IS.items()
}


def find(db: Connection, tenant: str, name: str) -> SpeakerRecord | None:
    """The row of a name or an id; a name is compared folded."""
    for column, key in keys_of(name):
        where = {"tenant": tenant, column: key}
        row = db.execute(RECORDS.where(_IS[column]), where).first()
        if row is not None:
            return of_row(row)
    return None


def find_with_kinds(
    db: Database, tenant: str, name: str
) -> tuple[SpeakerRecord, list[str]] | None:
    """The row of a name or id, and the kinds of files stored for its audio, at once."""
    for column, key in keys_of(name):
        row = db.first_at_once(_WITH_KINDS[column], {"tenant": tenant, column: key})
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
    identity = None if old is not None else new.identity
    if identity is not None:  # unless a voice of any tenant has the id
        has_id = speaker.c.speaker_id == identity.public_id
        if db.execute(select(speaker.c.generation).where(has_id)).first() is not None:
            identity = None
    if identity is None:
        identity = Identity(
            new_id(VOICE_PREFIX) if old is None else old.speaker_id,
            schema.now(db) if new.created_at is None else new.created_at,
        )
    if old is not None:
        delete(db, old)
    values: dict[str, Any] = {field: getattr(new, field) for field in _GIVEN}
    values["name_key"] = new.name_key
    values["speaker_id"] = identity.public_id
    values["updated_at"] = identity.updated_at
    values["consent_id"] = consent_id
    values["labels_json"] = labels_to_json(new.labels) if new.labels else None
    starts = new.clip_starts
    values["clip_starts_json"] = json.dumps(starts) if len(starts) > 1 else None
    searched = search_text(new.name, new.description, *new.labels.values())
    values["search_text"] = searched
    values["embedding"] = pack_embedding(new.embedding) if new.embedding else None
    values["created_at"] = identity.created_at
    db.execute(speaker.insert(), values)
    owners.count(db, new.tenant, voices=1)
    record = find_named(db, new.tenant, new.name_key)
    assert record is not None  # inserted above, in this transaction
    if new.labels:
        _label(db, record)
    return record


def change(db: Connection, record: SpeakerRecord, values: Mapping[str, Any]) -> None:
    """Write the columns that are new, of a record that has been changed already."""
    texts = record.name, record.description, *record.labels.values()
    where = speaker.c.generation == record.generation
    new = {**values, "search_text": search_text(*texts)}
    db.execute(speaker.update().where(where).values(**new))
    _label(db, record)


def find_named(db: Connection, tenant: str, name_key: str) -> SpeakerRecord | None:
    """The row of a folded name."""
    where = {"tenant": tenant, "name_key": name_key}
    row = db.execute(RECORDS.where(_IS_NAMED), where).first()
    return None if row is None else of_row(row)


def delete(db: Connection, record: SpeakerRecord) -> None:
    """Remove a row and its labels."""
    number = record.generation
    db.execute(speaker_label.delete().where(speaker_label.c.generation == number))
    db.execute(speaker.delete().where(speaker.c.generation == number))
    owners.count(db, record.tenant, voices=-1)
    if record.audio_sha256 is not None:
        owners.disown(db, record.tenant, record.audio_sha256)


def expired(db: Connection, now: float, limit: int) -> list[SpeakerRecord]:
    """Speakers whose end has come, those that wait longest first."""
    query = RECORDS.where(speaker.c.expires_at <= now)
    rows = db.execute(query.order_by(speaker.c.expires_at).limit(limit))
    return [of_row(row) for row in rows]


def expired_names(db: Connection, now: float, limit: int) -> list[str]:
    """The names of such speakers; reads no more of them."""
    query = select(speaker.c.name).where(speaker.c.expires_at <= now)
    names = db.execute(query.order_by(speaker.c.expires_at).limit(limit)).scalars()
    return list(names)


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
    query = select(speaker.c.generation, speaker.c.name, speaker.c.name_key)
    return [
        f"speaker {name!r} ({generation}): its key is {name_key!r}"
        for generation, name, name_key in db.execute(query)
        if name_key != fold(name)
    ]


def of_row(row: Sequence[Any]) -> SpeakerRecord:
    """What a row of ``RECORDS`` says."""
    return SpeakerRecord(**dict(zip(_FIELDS, row, strict=True)))


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
