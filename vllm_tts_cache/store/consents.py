"""Keeping, finding and deleting consent recordings, each in one transaction."""

from sqlalchemy import Connection

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.catalogue import consents, deletions, speakers, tenant_usage
from vllm_tts_cache.catalogue.consents import ConsentRecord
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.record import DEFAULT_TENANT, Segment
from vllm_tts_cache.errors import (
    ConsentInUseError,
    ConsentLimitError,
    ConsentNotFoundError,
)
from vllm_tts_cache.store.registrations import deleted_audio
from vllm_tts_cache.store.writing import Owner, Writer
from vllm_tts_cache.tenants import NO_LIMITS, Limits

# Of the voices that stand on a recording, as many are named.
_MAX_NAMED = 20


class Consents:
    """Consent recordings; see `SpeakerStore`, which it is a part of.

    Every method raises StorageError if the disk or the catalogue fails.

    Args:
        max_recordings: At most, all tenants together; 0 means no limit.
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
    ) -> ConsentRecord:
        """Keep a recording.

        A tenant may keep as many as voices.

        Raises:
            InvalidSpeakerError: The label or the language cannot be.
            ConsentLimitError: There are as many as there may be.
            AudioBudgetError: The registered audio would be too much.
        """

        def commit(db: Connection) -> ConsentRecord:
            limit = limits.max_voices
            used = tenant_usage.of_tenant(db, tenant).num_consents
            if limit is not None and used >= limit:
                raise ConsentLimitError(limit, is_tenants=True)
            if 0 < self._max_recordings <= consents.count(db):
                raise ConsentLimitError(self._max_recordings)
            return consents.add(
                db,
                name=name,
                language=language,
                audio_sha256=audio.audio.audio_sha256,
                num_samples=audio.audio.num_samples,
                sample_rate_hz=audio.audio.sample_rate_hz,
                tenant=tenant,
            )

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
        with self._database.read() as db:
            return consents.of_audio(db, audio_sha256, tenant)

    def on_page(
        self, limit: int, after: str = "", tenant: str = DEFAULT_TENANT
    ) -> list[ConsentRecord]:
        """Return recordings, newest first.

        Raises: InvalidSpeakerError: There is no recording ``after``.
        """
        with self._database.read() as db:
            return consents.on_page(db, limit=limit, after=after, tenant=tenant)

    def rename(
        self, consent_id: str, name: str, tenant: str = DEFAULT_TENANT
    ) -> ConsentRecord:
        """Change the label.

        Raises: ConsentNotFoundError, InvalidSpeakerError.
        """
        name = consents.checked_name(name)
        with self._database.write() as db:
            _found(db, consent_id, tenant)
            consents.rename(db, consent_id, name)
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
            consents.delete(db, record)
            deletions.delete_old(db)
            sha = deleted_audio(db, record.audio_sha256, tenant)
            return deletions.add(db, sha, tenant=tenant, public_id=consent_id)


def _found(db: Connection, consent_id: str, tenant: str) -> ConsentRecord:
    if (record := consents.find(db, consent_id, tenant)) is None:
        raise ConsentNotFoundError(consent_id)
    return record
