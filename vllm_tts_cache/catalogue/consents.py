"""Rows of the table ``consent``: recordings in which somebody agrees to be cloned."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Connection, func, select

from vllm_tts_cache.catalogue import owners, schema
from vllm_tts_cache.catalogue.names import clean, is_consent_id, new_consent_id
from vllm_tts_cache.catalogue.records import (
    DEFAULT_TENANT,
    Identity,
    check_language,
)
from vllm_tts_cache.catalogue.schema import consent
from vllm_tts_cache.errors import InvalidSpeakerError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsentRecord:
    """A consent recording.

    Attributes:
        number: Grows with every recording; the order of lists.
        consent_id: Its public id.
        name: A label for people; need not be unique.
        language: BCP 47 tag of what is said.
        audio_sha256: Content address of the recording.
        created_at: Unix seconds.
    """

    number: int
    consent_id: str
    tenant: str
    name: str
    language: str
    audio_sha256: str
    num_samples: int
    sample_rate_hz: int
    created_at: float


_FIELDS = tuple(field.name for field in fields(ConsentRecord))
_COLUMNS = [consent.c[field] for field in _FIELDS]


def add(
    db: Connection,
    *,
    name: str,
    language: str,
    audio_sha256: str,
    num_samples: int,
    sample_rate_hz: int,
    tenant: str = DEFAULT_TENANT,
    identity: Identity | None = None,
) -> ConsentRecord:
    """Insert a row with a new id, or with an identity whose id no other row has.

    That the tenant owns the audio is for whoever stores that, and knows its bytes.

    Raises: InvalidSpeakerError.
    """
    check_language(language)
    if identity is not None:
        has_id = consent.c.consent_id == identity.public_id
        if db.execute(select(consent.c.number).where(has_id)).first() is not None:
            identity = None
    if identity is None:
        identity = Identity(new_consent_id(), schema.now(db))
    row: dict[str, Any] = {
        "consent_id": identity.public_id,
        "tenant": tenant,
        "name": clean(name),
        "language": language,
        "audio_sha256": audio_sha256,
        "num_samples": num_samples,
        "sample_rate_hz": sample_rate_hz,
        "created_at": identity.created_at,
    }
    query = consent.insert().values(**row).returning(consent.c.number)
    record = ConsentRecord(number=db.execute(query).scalar_one(), **row)
    owners.count(db, tenant, consents=1)
    return record


def find(
    db: Connection, consent_id: str, tenant: str = DEFAULT_TENANT
) -> ConsentRecord | None:
    """The recording with this id."""
    if not is_consent_id(consent_id):
        return None
    where = consent.c.consent_id == consent_id, consent.c.tenant == tenant
    row = db.execute(select(*_COLUMNS).where(*where)).first()
    return None if row is None else _record(row)


def of_audio(db: Connection, audio_sha256: str, tenant: str) -> ConsentRecord | None:
    """The oldest recording that is this audio."""
    where = consent.c.audio_sha256 == audio_sha256, consent.c.tenant == tenant
    query = select(*_COLUMNS).where(*where).order_by(consent.c.number)
    row = db.execute(query.limit(1)).first()
    return None if row is None else _record(row)


def on_page(
    db: Connection, *, limit: int, after: str = "", tenant: str = DEFAULT_TENANT
) -> list[ConsentRecord]:
    """Recordings, newest first, behind the one with the id ``after``.

    Raises: InvalidSpeakerError: There is no such recording.
    """
    query = select(*_COLUMNS).where(consent.c.tenant == tenant)
    if after:
        if (last := find(db, after, tenant)) is None:
            raise InvalidSpeakerError("after", "there is no consent recording of it")
        query = query.where(consent.c.number < last.number)
    rows = db.execute(query.order_by(consent.c.number.desc()).limit(limit))
    return [_record(row) for row in rows]


def rename(db: Connection, consent_id: str, name: str) -> None:
    """Change the label; it has been checked."""
    where = consent.c.consent_id == consent_id
    db.execute(consent.update().where(where).values(name=name))


def delete(db: Connection, record: ConsentRecord) -> None:
    """Remove the row."""
    db.execute(consent.delete().where(consent.c.consent_id == record.consent_id))
    owners.count(db, record.tenant, consents=-1)
    owners.disown(db, record.tenant, record.audio_sha256)


def count(db: Connection) -> int:
    """How many there are, all tenants together; reads an index once through."""
    return db.execute(select(func.count(consent.c.number))).scalar_one()


def _record(row: Sequence[Any]) -> ConsentRecord:
    return ConsentRecord(**dict(zip(_FIELDS, row, strict=True)))
