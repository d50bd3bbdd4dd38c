"""Registering and deleting speakers, each in one transaction."""

from dataclasses import dataclass

from sqlalchemy import Connection

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.catalogue import deletions, imports, speakers, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.imports import ImportedFile
from vllm_tts_cache.catalogue.names import fold, is_storable
from vllm_tts_cache.catalogue.record import (
    DEFAULT_TENANT,
    NewSpeaker,
    Segment,
    SpeakerRecord,
)
from vllm_tts_cache.config import RegistrationPolicy
from vllm_tts_cache.errors import (
    SpeakerExistsError,
    SpeakerLimitError,
    SpeakerNotFoundError,
)
from vllm_tts_cache.store.writing import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The new record, and what its name took over.

    Attributes:
        deletion: Of the replaced one, if it had audio and is not registered anew as
            it was: still to be carried out by `SpeakerStore.remove_files`.
    """

    record: SpeakerRecord
    replaced: SpeakerRecord | None
    deletion: Deletion | None


class Registrations:
    """Changes who is registered; see `SpeakerStore`, which it is a part of.

    Args:
        database: The catalogue's.
        writer: Stores the audio in the transaction that registers it.
        max_speakers: As of the store.
        policy: As of the store.
    """

    def __init__(
        self,
        database: Database,
        writer: Writer,
        *,
        max_speakers: int,
        policy: RegistrationPolicy,
    ):
        self._database = database
        self._writer = writer
        self._max_speakers = max_speakers
        self._policy: RegistrationPolicy = policy

    def register(self, new: NewSpeaker, audio: DecodedAudio | None) -> Registered:
        """Register a speaker; readers see the old one until they see the new one.

        Args:
            new: What is registered; with ``audio_sha256`` exactly if there is audio.
            audio: The reference audio.

        Raises:
            SpeakerExistsError: The name is taken and the policy is ``immutable``.
            SpeakerLimitError: The name is new and the catalogue is full.
            AudioBudgetError: The audio of all speakers would be too much.
            StorageFullError: There is no space left; nothing was changed.
        """

        def commit(db: Connection) -> Registered:
            replaced = speakers.find(db, new.tenant, new.name_key)
            if replaced is not None and self._policy == "immutable":
                raise SpeakerExistsError(replaced.name)
            if replaced is None and self._is_full(db):
                raise SpeakerLimitError(self._max_speakers)
            return _replace(db, new, replaced)

        if audio is None:
            with self._database.write() as db:
                return commit(db)
        return self._writer.keep(audio, Segment.REGISTERED, commit)

    def import_speaker(
        self, new: NewSpeaker, audio: DecodedAudio | None, file: ImportedFile
    ) -> tuple[str | None, Deletion | None]:
        """Register a voice of stock's, and remember the file it was in.

        The limits do not apply: what stock kept is not lost because more was kept
        than may be added now.

        Returns:
            Why it was not registered, None if it was; and the deletion of what it
            replaced, as `register` returns it.
        """

        def commit(db: Connection) -> tuple[str | None, Deletion | None]:
            refusal = imports.refusal(db, file.name_key, file.created_at, self._policy)
            if refusal is not None:
                raise _RefusedError(refusal)
            imports.remember(db, file)
            replaced = speakers.find(db, new.tenant, new.name_key)
            return None, _replace(db, new, replaced).deletion

        try:
            if audio is not None:
                return self._writer.keep(
                    audio, Segment.REGISTERED, commit, is_bounded=False
                )
            with self._database.write() as db:
                return commit(db)
        except _RefusedError as exc:
            return str(exc), None

    def delete(self, name: str, tenant: str = DEFAULT_TENANT) -> Deletion:
        """Delete a speaker: from here on nobody finds it.

        Its files are still to be removed, by `SpeakerStore.remove_files`, and what
        participants remember is still to be confirmed; that this is to be done is
        committed.

        Raises:
            SpeakerNotFoundError: No speaker has this name.
        """
        if not is_storable(name):
            raise SpeakerNotFoundError(name)
        name_key = fold(name)
        hashed = deletions.name_hash(tenant, name_key)
        with self._database.write() as db:
            record = speakers.find(db, tenant, name_key)
            if record is None:
                raise SpeakerNotFoundError(name)
            speakers.delete(db, tenant, name_key)
            deletions.drop_finished(db, hashed)
            deletions.drop_expired(db)
            deletion = deletions.add(db, _released(db, record), hashed)
            if tenant == DEFAULT_TENANT:
                imports.mark_deleted(db, name_key, deletion.id)
        return deletion

    def _is_full(self, db: Connection) -> bool:
        limit = self._max_speakers
        return limit > 0 and speakers.at_least(db, limit)


class _RefusedError(Exception):
    """A voice of stock's is not imported; the message says why."""


def _replace(
    db: Connection, new: NewSpeaker, replaced: SpeakerRecord | None
) -> Registered:
    record = speakers.replace(db, new)
    deletion = None
    if replaced is not None and _spoken(replaced) != _spoken(record):
        released = _released(db, replaced)
        deletion = None if released is None else deletions.add(db, released, None)
    return Registered(record=record, replaced=replaced, deletion=deletion)


def _spoken(record: SpeakerRecord) -> tuple[str | None, str | None]:
    """What processes remember of a speaker's prompts by."""
    return record.audio_sha256, record.ref_text


def _released(db: Connection, record: SpeakerRecord) -> str | None:
    """The audio of a speaker that was removed; if nobody else has it, its rows go.

    It is told even where others have it: what was remembered of it may hold the
    transcript of the one that is gone.
    """
    sha = record.audio_sha256
    if sha is not None and not speakers.is_referenced(db, sha):
        stored_files.remove(db, sha)
    return sha
