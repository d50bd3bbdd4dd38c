"""Recordings in which somebody agrees to be cloned: their rows and their audio."""

from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.catalogue import deletions, owners, schema, speakers, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.names import CONSENT_PREFIX, clean, is_consent_id, new_id
from vllm_tts_cache.catalogue.records import (
    DEFAULT_TENANT,
    Identity,
    Segment,
    check_language,
)
from vllm_tts_cache.catalogue.schema import consent
from vllm_tts_cache.errors import (
    ConsentInUseError,
    ConsentLimitError,
    ConsentNotFoundError,
    InvalidSpeakerError,
)
from vllm_tts_cache.store.writer import Owner, Writer
from vllm_tts_cache.tenants import NO_LIMITS, Limits

# Of the voices that stand on a recording, as many are named.
_MAX_NAMED = 20


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


_COLUMNS = [consent.c[field.name] for field in fields(ConsentRecord)]


def find(db: Connection, consent_id: str, tenant: str) -> ConsentRecord | None:
    """The recording with this id."""
    if not is_consent_id(consent_id):
        return None
    return _first(db, consent.c.consent_id == consent_id, consent.c.tenant == tenant)


class Consents:
    """Consent recordings; see `SpeakerStore`, which it is a part of.

    There are ``max_recordings`` at most, all tenants together; 0 means no limit.
    """

    def __init__(self, database: Database, writer: Writer, *, max_recordings: int):
        self._database = database
        self._writer = writer
        self._max_recordings = max_recordings

    def add(
        self,
        name: str,
        language: str,
        audio: DecodedAudio,
        tenant: str = DEFAULT_TENANT,
        limits: Limits = NO_LIMITS,
        identity: Identity | None = None,
    ) -> ConsentRecord:
        """Keep a recording, with a new id unless it brings one that is free.

        A tenant may keep as many as voices.

        Raises:
            InvalidSpeakerError: The label or the language cannot be.
            ConsentLimitError: There are as many as there may be.
            AudioBudgetError: The registered audio would be too much.
        """

        def commit(db: Connection) -> ConsentRecord:
            self._check_room(db, tenant, limits)
            check_language(language)
            is_taken = identity is not None and _first(
                db, consent.c.consent_id == identity.public_id
            )
            if identity is None or is_taken:
                its = Identity(new_id(CONSENT_PREFIX), schema.now(db))
            else:
                its = identity
            row: dict[str, Any] = {
                "consent_id": its.public_id,
                "tenant": tenant,
                "name": clean(name),
                "language": language,
                "audio_sha256": audio.audio.audio_sha256,
                "num_samples": audio.audio.num_samples,
                "sample_rate_hz": audio.audio.sample_rate_hz,
                "created_at": its.created_at,
            }
            query = consent.insert().values(**row).returning(consent.c.number)
            number = db.execute(query).scalar_one()
            owners.count(db, tenant, consents=1)
            return ConsentRecord(number=number, **row)

        owner = Owner(tenant=tenant, max_audio_bytes=limits.max_audio_bytes)
        return self._writer.keep(audio, Segment.REGISTERED, commit, owner=owner)

    def get(self, consent_id: str, tenant: str = DEFAULT_TENANT) -> ConsentRecord:
        """Return a recording. Raises: ConsentNotFoundError."""
        with self._database.read() as db:
            return _found(db, consent_id, tenant)

    def of_audio(
        self, audio_sha256: str, tenant: str = DEFAULT_TENANT
    ) -> ConsentRecord | None:
        """Return the oldest recording that is this audio, None if none is."""
        is_audio = consent.c.audio_sha256 == audio_sha256
        with self._database.read() as db:
            return _first(db, is_audio, consent.c.tenant == tenant)

    def on_page(
        self, limit: int, after: str = "", tenant: str = DEFAULT_TENANT
    ) -> list[ConsentRecord]:
        """Return recordings, newest first, behind the one with the id ``after``.

        Raises: InvalidSpeakerError: There is no such recording.
        """
        query = select(*_COLUMNS).where(consent.c.tenant == tenant)
        query = query.order_by(consent.c.number.desc()).limit(limit)
        with self._database.read() as db:
            if after:
                if (last := find(db, after, tenant)) is None:
                    reason = "there is no consent recording of it"
                    raise InvalidSpeakerError("after", reason)
                query = query.where(consent.c.number < last.number)
            return [ConsentRecord(**row) for row in db.execute(query).mappings()]

    def rename(
        self, consent_id: str, name: str, tenant: str = DEFAULT_TENANT
    ) -> ConsentRecord:
        """Change the label. Raises: ConsentNotFoundError, InvalidSpeakerError."""
        name = clean(name)
        with self._database.write() as db:
            _found(db, consent_id, tenant)
            where = consent.c.consent_id == consent_id
            db.execute(consent.update().where(where).values(name=name))
            return _found(db, consent_id, tenant)

    def delete(self, consent_id: str, tenant: str = DEFAULT_TENANT) -> Deletion:
        """Delete a recording that no voice stands on; its files are still to go.

        Raises:
            ConsentNotFoundError: There is none with this id.
            ConsentInUseError: Voices stand on it.
        """
        with self._database.write() as db:
            record = _found(db, consent_id, tenant)
            if voices := speakers.standing_on(db, consent_id, _MAX_NAMED):
                raise ConsentInUseError(consent_id, voices)
            db.execute(consent.delete().where(consent.c.consent_id == consent_id))
            owners.count(db, tenant, consents=-1)
            owners.disown(db, tenant, record.audio_sha256)
            deletions.delete_old(db)
            stored_files.remove_unowned(db, record.audio_sha256)
            sha = record.audio_sha256
            return deletions.add(db, sha, tenant=tenant, public_id=consent_id)

    def _check_room(self, db: Connection, tenant: str, limits: Limits) -> None:
        limit = limits.max_voices
        if limit is not None and owners.of_tenant(db, tenant).num_consents >= limit:
            raise ConsentLimitError(limit, is_tenants=True)
        count = select(func.count(consent.c.number))
        if 0 < self._max_recordings <= db.execute(count).scalar_one():
            raise ConsentLimitError(self._max_recordings)


def _first(db: Connection, *where: "ColumnElement[bool]") -> ConsentRecord | None:
    query = select(*_COLUMNS).where(*where).order_by(consent.c.number).limit(1)
    row = db.execute(query).mappings().first()
    return None if row is None else ConsentRecord(**row)


def _found(db: Connection, consent_id: str, tenant: str) -> ConsentRecord:
    if (record := find(db, consent_id, tenant)) is None:
        raise ConsentNotFoundError(consent_id)
    return record
