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
    exists,
    func,
    literal_column,
    select,
)

from vllm_tts_cache.catalogue import aliases, owners, schema
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
    pack_embedding,
    to_json,
    unpack_embedding,
)
from vllm_tts_cache.catalogue.schema import (
    LOOKED_AT,
    failed_encode,
    speaker,
    speaker_label,
    stored_file,
)
from vllm_tts_cache.errors import SpeakerExistsError

_MAX_NAMED = 100_000

_FIELDS = SpeakerRecord.__struct_fields__
_NOT_A_COLUMN = ("labels", "extras", "clip_starts", "identity", "idempotency_key")
_GIVEN = tuple(f.name for f in fields(NewSpeaker) if f.name not in _NOT_A_COLUMN)

# The length does not read the embedding.
_num_bytes = func.length(speaker.c.embedding, type_=Integer)
_embedding_dim = _num_bytes // literal_column("4", Integer)
# Whole records; see `of_row`.
_row = speaker.c
_COLUMNS = [_embedding_dim if f == "embedding_dim" else _row[f] for f in _FIELDS]
RECORDS = select(*_COLUMNS)
_IS_TENANTS = speaker.c.tenant == bindparam("tenant")
_IS_NAMED = _IS_TENANTS & (speaker.c.name_key == bindparam("name_key"))
_HAS_ID = _IS_TENANTS & (speaker.c.speaker_id == bindparam("speaker_id"))
_SPACE = cast(Any, literal_column("' '", Text))  # rendered once, unlike a text
# One row, however many files: building a row takes as long as finding it.
_artifacts = (
    select(func.aggregate_strings(stored_file.c.artifact, _SPACE))
    .where(stored_file.c.audio_sha256 == speaker.c.audio_sha256)
    .scalar_subquery()
)
_INSERT = speaker.insert().returning(*_COLUMNS)
_HAS_EXPIRED = speaker.c.expires_at <= bindparam("now")
_EXPIRED = select(speaker.c.generation).where(_HAS_EXPIRED).limit(1)
_IS = {"name_key": _IS_NAMED, "speaker_id": _HAS_ID, "alias_key": aliases.HAS_ALIAS}
_BY = {column: RECORDS.where(where) for column, where in _IS.items()}
_CALLED = RECORDS.where(_IS_NAMED | aliases.HAS_ALIAS)
_WITH_ARTIFACTS = {name: query.add_columns(_artifacts) for name, query in _BY.items()}


def find(db: Connection, tenant: str, name: str) -> SpeakerRecord | None:
    """Return the record of a name, an id or an alias; names are compared folded."""
    for column, key in keys_of(name):
        where = {"tenant": tenant, column: key}
        if (row := db.execute(_BY[column], where).first()) is not None:
            return of_row(row)
    return None


def find_with_artifacts(
    db: Database, tenant: str, name: str
) -> tuple[SpeakerRecord, list[str]] | None:
    """Return what `find` does of what has not expired, and its audio's artifacts."""
    for column, key in keys_of(name):
        row = db.first_at_once(_WITH_ARTIFACTS[column], {"tenant": tenant, column: key})
        if row is not None:
            record = of_row(row[:-1])
            if record.expires_at is None or not record.has_expired(db.now()):
                artifacts: str = row[-1] or ""
                return record, artifacts.split()
    return None


def replace(
    db: Connection,
    new: NewSpeaker,
    old: SpeakerRecord | None,
    consent_id: str | None = None,
) -> SpeakerRecord:
    """Insert a speaker, in the place and with the id of the one that has its name.

    The tenant's ownership of the audio is counted by `Writer`, which knows its bytes.
    """
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
    values["precompute"] = int(new.precompute)
    values["speaker_id"] = identity.public_id
    values["updated_at"] = identity.updated_at
    values["consent_id"] = consent_id
    values["labels_json"] = to_json(new.labels) if new.labels else None
    extras = {**(old.extras if old else {}), **new.extras}
    values["extras_json"] = to_json(extras) if extras else None
    starts = new.clip_starts
    values["clip_starts_json"] = json.dumps(starts) if len(starts) > 1 else None
    texts = *new.labels.values(), *(extras.get("aliases") or ())
    values["search_text"] = search_text(new.name, new.description, *texts)
    values["embedding"] = pack_embedding(new.embedding) if new.embedding else None
    values["created_at"] = identity.created_at
    record = of_row(db.execute(_INSERT, values).one())
    owners.count(db, new.tenant, voices=1)
    if new.labels:
        _label(db, record)
    if record.extras_json is not None:
        aliases.store(db, record.tenant, record.generation, record.aliases)
    return record


def change(db: Connection, record: SpeakerRecord, values: Mapping[str, Any]) -> None:
    """Write new values of columns, which ``record`` has already."""
    texts = record.name, record.description, *record.labels.values(), *record.aliases
    where = speaker.c.generation == record.generation
    new = {**values, "search_text": search_text(*texts)}
    db.execute(speaker.update().where(where).values(**new))
    _label(db, record)
    if "extras_json" in values:
        aliases.store(db, record.tenant, record.generation, record.aliases)


def find_named(db: Connection, tenant: str, name_key: str) -> SpeakerRecord | None:
    """Return the record of a folded name.

    Raises: SpeakerExistsError: It is an alias of another voice.
    """
    where = {"tenant": tenant, "name_key": name_key, "alias_key": name_key}
    named = None
    for found in map(of_row, db.execute(_CALLED, where).all()):
        if found.name_key == name_key:
            named = found
        elif not found.has_expired(schema.now(db)):  # else its names are free
            raise SpeakerExistsError(found.name, hint=aliases.an_alias(name_key))
    return named


def delete(db: Connection, record: SpeakerRecord) -> None:
    """Delete a speaker's row, labels and aliases; take it off its tenant's usage."""
    number = record.generation
    db.execute(speaker_label.delete().where(speaker_label.c.generation == number))
    if record.extras_json is not None:
        aliases.delete(db, number)
    db.execute(speaker.delete().where(speaker.c.generation == number))
    owners.count(db, record.tenant, voices=-1)
    if record.audio_sha256 is not None:
        owners.disown(db, record.tenant, record.audio_sha256)


def expired(db: Connection, now: float, limit: int) -> list[SpeakerRecord]:
    """Return expired speakers, those with the earliest end first."""
    query = RECORDS.where(_HAS_EXPIRED).order_by(speaker.c.expires_at).limit(limit)
    return [of_row(row) for row in db.execute(query, {"now": now})]


def expired_names(db: Connection) -> list[str]:
    """Return the names of expired speakers that are not deleted yet, in that order.

    Reads no records.
    """
    query = select(speaker.c.name).where(_HAS_EXPIRED)
    query = query.order_by(speaker.c.expires_at).limit(_MAX_NAMED)
    return list(db.execute(query, {"now": schema.now(db)}).scalars())


def have_expired(db: Connection) -> bool:
    """Whether there is an expired speaker to delete; run every second, by an index."""
    return db.execute(_EXPIRED, {"now": schema.now(db)}).first() is not None


def unencoded(
    db: Connection, fingerprints: Sequence[str], after: int, limit: int
) -> list[SpeakerRecord]:
    """Return speakers to precompute for which not all encodings are stored.

    A speaker that needs fewer than the encoders with these fingerprints is returned as
    well. A failed encode that is not worth another try yet leaves its speaker out.
    Those behind the generation ``after`` come first; fewer than ``limit`` need not be
    the last.
    """
    has = stored_file.c.audio_sha256 == speaker.c.audio_sha256
    of_these = stored_file.c.artifact.in_(fingerprints)
    num_stored = select(func.count()).where(has, of_these).scalar_subquery()
    waits = exists().where(
        failed_encode.c.audio_sha256 == speaker.c.audio_sha256,
        failed_encode.c.artifact.in_(fingerprints),
        failed_encode.c.next_try > schema.now(db),
    )
    query = RECORDS.where(
        speaker.c.generation > bindparam("after"),
        speaker.c.generation <= bindparam("last"),
        speaker.c.audio_sha256.is_not(None),
        speaker.c.precompute == 1,
        num_stored < len(fingerprints),
        ~waits,
    )
    query = query.order_by(speaker.c.generation).limit(limit)
    newest = last_generation(db)
    while after < newest:
        # One statement over a million voices that are all encoded takes longer than
        # the server lets a statement take.
        where = {"after": after, "last": after + LOOKED_AT}
        if found := [of_row(row) for row in db.execute(query, where)]:
            return found
        after += LOOKED_AT
    return []


def to_retry(
    db: Connection, fingerprints: Sequence[str], limit: int
) -> list[SpeakerRecord]:
    """Return speakers to precompute with a failed encode that is worth another try."""
    due = select(failed_encode.c.audio_sha256).where(
        failed_encode.c.artifact.in_(fingerprints),
        failed_encode.c.next_try <= schema.now(db),
    )
    is_due = speaker.c.audio_sha256.in_(due)
    query = RECORDS.where(is_due, speaker.c.precompute == 1)
    # Else those that need it no more would be looked at for ever, and no others.
    query = query.order_by(func.random()).limit(limit)
    return [of_row(row) for row in db.execute(query)]


def set_precompute(db: Connection, generation: int) -> None:
    """Set that a speaker is precomputed that was registered without that."""
    where = speaker.c.generation == generation, speaker.c.precompute == 0
    db.execute(speaker.update().where(*where).values(precompute=1))


def last_generation(db: Connection) -> int:
    """Return the generation of the last registration; 0 if there is no speaker."""
    return db.execute(select(func.max(speaker.c.generation))).scalar() or 0


def standing_on(db: Connection, consent_id: str, limit: int) -> list[tuple[str, str]]:
    """Return ids and names of up to ``limit`` speakers with a consent recording."""
    columns = speaker.c.speaker_id, speaker.c.name
    query = select(*columns).where(speaker.c.consent_id == consent_id)
    rows = db.execute(query.order_by(speaker.c.name_key).limit(limit))
    return [(id_, name) for id_, name in rows]


def embedding(db: Connection, record: SpeakerRecord) -> tuple[float, ...] | None:
    """Return the embedding, float32 values of shape ``(embedding_dim,)``.

    None if the speaker has audio, or was replaced or deleted meanwhile.
    """
    is_it = speaker.c.generation == record.generation
    blob = db.execute(select(speaker.c.embedding).where(is_it)).scalar()
    return None if blob is None else unpack_embedding(blob)


def problems(db: Connection) -> list[str]:
    """Return a line for each row that is wrong."""
    query = select(speaker.c.generation, speaker.c.name, speaker.c.name_key)
    found = [
        f"speaker {name!r} ({generation}): its key is {name_key!r}"
        for generation, name, name_key in db.execute(query)
        if name_key != fold(name)
    ]
    return found + aliases.problems(db)


def of_row(row: Sequence[Any]) -> SpeakerRecord:
    """Return the record in a row of ``RECORDS``."""
    return SpeakerRecord(**dict(zip(_FIELDS, row, strict=True)))


def _label(db: Connection, record: SpeakerRecord) -> None:
    number = record.generation
    db.execute(speaker_label.delete().where(speaker_label.c.generation == number))
    repeated = "generation", "tenant", "name_key", "created_at"
    row = {name: getattr(record, name) for name in repeated}
    pairs = record.labels.items()
    rows = [row | {"label_key": fold(k), "label_value": fold(v)} for k, v in pairs]
    if rows:
        db.execute(speaker_label.insert(), rows)
