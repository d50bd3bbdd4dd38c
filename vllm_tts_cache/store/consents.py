"""Recordings in which a speaker consents to be cloned: their rows and audio."""

from dataclasses import dataclass, fields, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select

from vllm_tts_cache import errors
from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.catalogue import deletions, owners, schema, speakers, stored_files
from vllm_tts_cache.catalogue.database import Database, with_ballast
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.names import CONSENT_PREFIX, clean, is_consent_id, new_id
from vllm_tts_cache.catalogue.records import DEFAULT_TENANT, Identity, check_language
from vllm_tts_cache.catalogue.schema import consent
from vllm_tts_cache.store.writer import Writer
from vllm_tts_cache.tenants import NO_LIMITS, Limits, Tenant

# A ConsentInUseError names at most this many voices.
_MAX_NAMED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsentRecord:
    """A consent recording.

    Attributes:
        number: Grows with every recording.
        name: A label for people; need not be unique.
        language: BCP 47 tag of what is said.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NewConsent:
    """A recording to store; it gets the id and date of ``identity`` if that is free."""

    name: str
    language: str
    audio: DecodedAudio
    tenant: str
    identity: Identity | None = None


_COLUMNS = [consent.c[field.name] for field in fields(ConsentRecord)]


def find(db: Connection, consent_id: str, tenant: str) -> ConsentRecord | None:
    """Return the tenant's recording with this id; None if there is none."""
    if not is_consent_id(consent_id):
        return None
    return _first(db, consent.c.consent_id == consent_id, consent.c.tenant == tenant)


def of_audio(db: Connection, audio_sha256: str, tenant: str) -> ConsentRecord | None:
    """Return the tenant's oldest recording of this audio; None if there is none."""
    is_audio = consent.c.audio_sha256 == audio_sha256
    return _first(db, is_audio, consent.c.tenant == tenant)


def insert(
    db: Connection, new: NewConsent, limits: Limits, max_recordings: int
) -> ConsentRecord:
    """Insert a recording's row; the caller stores its audio in the same transaction.

    Raises: as `Consents.add`.
    """
    limit = limits.max_voices
    if limit is not None and owners.of_tenant(db, new.tenant).num_consents >= limit:
        raise errors.ConsentLimitError(limit, is_tenants=True)
    count = select(func.count(consent.c.number))
    if 0 < max_recordings <= db.execute(count).scalar_one():
        raise errors.ConsentLimitError(max_recordings)
    check_language(new.language)
    identity = new.identity
    if identity is None or _first(db, consent.c.consent_id == identity.public_id):
        identity = Identity(new_id(CONSENT_PREFIX), schema.now(db))
    row: dict[str, Any] = {
        "consent_id": identity.public_id,
        "tenant": new.tenant,
        "name": clean(new.name),
        "language": new.language,
        "audio_sha256": new.audio.audio.audio_sha256,
        "num_samples": new.audio.audio.num_samples,
        "sample_rate_hz": new.audio.audio.sample_rate_hz,
        "created_at": identity.created_at,
    }
    query = consent.insert().values(**row).returning(consent.c.number)
    number = db.execute(query).scalar_one()
    owners.count(db, new.tenant, consents=1)
    return ConsentRecord(number=number, **row)


class Consents:
    """Consent recordings; see `SpeakerStore`, which it is a part of.

    There are ``max_recordings`` at most, all tenants together; 0 means no limit.
    """

    def __init__(self, database: Database, writer: Writer, *, max_recordings: int):
        self.database = database
        self._writer = writer
        self._max_recordings = max_recordings

    def add(
        self,
        name: str,
        language: str,
        audio: DecodedAudio,
        tenant: str = DEFAULT_TENANT,
        limits: Limits = NO_LIMITS,
    ) -> ConsentRecord:
        """Store a recording; a tenant may have as many as it may have voices.

        Raises:
            InvalidSpeakerError: The label or the language is invalid.
            ConsentLimitError: The limit of recordings is reached.
            AudioBudgetError: The registered audio would exceed its budget.
        """
        new = NewConsent(name=name, language=language, audio=audio, tenant=tenant)
        return self._writer.store_audio(
            audio,
            Segment.REGISTERED,
            lambda db: insert(db, new, limits, self._max_recordings),
            owner=Tenant(name=tenant, limits=limits),
        )

    def get(self, consent_id: str, tenant: str = DEFAULT_TENANT) -> ConsentRecord:
        """Return a recording. Raises: ConsentNotFoundError."""
        with self.database.read() as db:
            return _found(db, consent_id, tenant)

    def on_page(
        self, limit: int, after: str = "", tenant: str = DEFAULT_TENANT
    ) -> list[ConsentRecord]:
        """Return recordings, newest first, behind the one with the id ``after``.

        Raises: InvalidSpeakerError: No recording has the id ``after``.
        """
        query = select(*_COLUMNS).where(consent.c.tenant == tenant)
        query = query.order_by(consent.c.number.desc()).limit(limit)
        with self.database.read() as db:
            if after:
                if (last := find(db, after, tenant)) is None:
                    reason = "no consent recording has this id"
                    raise errors.InvalidSpeakerError("after", reason)
                query = query.where(consent.c.number < last.number)
            return [ConsentRecord(**row) for row in db.execute(query).mappings()]

    def rename(
        self, consent_id: str, name: str, tenant: str = DEFAULT_TENANT
    ) -> ConsentRecord:
        """Change the label. Raises: ConsentNotFoundError, InvalidSpeakerError."""
        name = clean(name)
        with self.database.write() as db:
            record = _found(db, consent_id, tenant)
            where = consent.c.consent_id == consent_id
            db.execute(consent.update().where(where).values(name=name))
        return replace(record, name=name)

    @with_ballast
    def delete(self, consent_id: str, tenant: str = DEFAULT_TENANT) -> Deletion:
        """Delete a recording that no voice uses; `remove_files` then removes its files.

        Raises:
            ConsentNotFoundError: No recording has this id.
            ConsentInUseError: Voices use it.
        """
        with self.database.write() as db:
            sha = _found(db, consent_id, tenant).audio_sha256
            if voices := speakers.standing_on(db, consent_id, _MAX_NAMED):
                raise errors.ConsentInUseError(consent_id, voices)
            db.execute(consent.delete().where(consent.c.consent_id == consent_id))
            owners.count(db, tenant, consents=-1)
            owners.disown(db, tenant, sha)
            deletions.delete_old(db)
            stored_files.remove_unowned(db, sha)
            return deletions.add(db, sha, tenant=tenant, public_id=consent_id)


def _first(db: Connection, *where: "ColumnElement[bool]") -> ConsentRecord | None:
    query = select(*_COLUMNS).where(*where).order_by(consent.c.number).limit(1)
    row = db.execute(query).mappings().first()
    return None if row is None else ConsentRecord(**row)


def _found(db: Connection, consent_id: str, tenant: str) -> ConsentRecord:
    if (record := find(db, consent_id, tenant)) is None:
        raise errors.ConsentNotFoundError(consent_id)
    return record
