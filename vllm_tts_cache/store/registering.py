"""Registering, changing and deleting speakers, each in one transaction."""

import dataclasses
import time
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import Connection

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.catalogue import deletions, owners, schema, speakers, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.names import is_consent_id
from vllm_tts_cache.catalogue.records import (
    AUDIO_KIND,
    DEFAULT_TENANT,
    NewSpeaker,
    Segment,
    SpeakerChanges,
    SpeakerRecord,
    check_is_to_come,
    pack_embedding,
)
from vllm_tts_cache.config import RegistrationPolicy, Settings
from vllm_tts_cache.errors import (
    CHOOSE_ANOTHER,
    ConsentRequiredError,
    SpeakerExistsError,
    SpeakerLimitError,
    SpeakerNotFoundError,
)
from vllm_tts_cache.files import storage_errors, sync_directory
from vllm_tts_cache.store import consents, stock_files
from vllm_tts_cache.store.blobs import BlobOwner
from vllm_tts_cache.store.stock_files import ImportedFile
from vllm_tts_cache.store.writer import Owner, Writer
from vllm_tts_cache.tenants import NO_LIMITS, Limits

_DELETE_OLD_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The new record, and what its name took over.

    Attributes:
        deletion: Of the replaced one, if it had audio or a file of stock's and is not
            registered anew as it was: still to be carried out by
            `SpeakerStore.remove_files`.
    """

    record: SpeakerRecord
    replaced: SpeakerRecord | None
    deletion: Deletion | None


class Registrations:
    """Changes who is registered; see `SpeakerStore`, which it is a part of.

    The settings say how many speakers there may be, all tenants together; whether a
    name may be taken over; whether a voice stands on a consent recording.
    """

    def __init__(self, database: Database, writer: Writer, settings: Settings):
        self._database = database
        self._writer = writer
        self._max_speakers = settings.max_uploaded
        self._policy: RegistrationPolicy = settings.registration_policy
        self._needs_recording = settings.consent == "recording"
        self._delete_old_next = 0.0

    def register(
        self,
        new: NewSpeaker,
        audio: DecodedAudio | None,
        *,
        is_new: bool = False,
        limits: Limits = NO_LIMITS,
    ) -> Registered:
        """Register a speaker; readers see the old one until they see the new one.

        Args:
            new: What is registered; with ``audio_sha256`` exactly if there is audio.
            audio: The reference audio.
            is_new: Whether it may replace nobody, whatever the policy.
            limits: Of its tenant.

        Raises:
            SpeakerExistsError: The name is taken and may not be.
            SpeakerLimitError: The name is new and the catalogue is full.
            AudioBudgetError: The audio of all speakers would be too much.
            ConsentRequiredError: A recording is needed, and the consent names none.
            StorageFullError: There is no space left; nothing was changed.
        """

        def commit(db: Connection) -> Registered:
            now = schema.now(db)
            if new.expires_at is not None:
                check_is_to_come(new.expires_at, now)
            replaced = speakers.find_named(db, new.tenant, new.name_key)
            if replaced is not None and replaced.has_expired(now):
                # Nobody finds it any more: its id and its name are free. What is
                # left of it is removed by whoever adopts deletions.
                self._delete(db, replaced)
                replaced = None
            if replaced is None:
                self._check_room(db, new.tenant, limits)
            elif self._policy == "immutable" and not _brings_back(db, new, replaced):
                raise SpeakerExistsError(replaced.name)
            elif is_new:
                raise SpeakerExistsError(replaced.name, hint=CHOOSE_ANOTHER)
            is_same = replaced is not None and _sounds_the_same(db, new, replaced)
            done = _replace(db, new, replaced, self._consent_id(db, new))
            return done if is_same else _with_stock_files(db, done)

        owner = Owner(tenant=new.tenant, max_audio_bytes=limits.max_audio_bytes)
        return self._writer.keep(audio, Segment.REGISTERED, commit, owner=owner)

    def import_speaker(
        self, new: NewSpeaker, audio: DecodedAudio | None, file: ImportedFile
    ) -> Deletion | None:
        """Register a voice of stock's, and remember the file it was in.

        The limits do not apply: what stock kept is not lost because more was kept
        than may be added now. The deletion of what it replaced is returned as by
        `register`.

        Raises: StockFileError: It was deleted since, or is registered.
        """

        def commit(db: Connection) -> Deletion | None:
            stock_files.check(db, file, self._policy)
            stock_files.remember(db, file)
            replaced = speakers.find_named(db, new.tenant, new.name_key)
            return _replace(db, new, replaced).deletion

        owner = Owner(tenant=new.tenant)
        return self._writer.keep(
            audio, Segment.REGISTERED, commit, owner=owner, is_bounded=False
        )

    def change(
        self, name: str, changes: SpeakerChanges, tenant: str = DEFAULT_TENANT
    ) -> Registered:
        """Change what is written beside a speaker, its name included.

        Raises:
            SpeakerNotFoundError: No speaker has this name or id.
            SpeakerExistsError: Another one has the new name.
            InvalidSpeakerError: The speaker cannot be changed so.
        """
        with self._database.write() as db:
            before = _find(db, name, tenant)
            now = schema.now(db)
            if before.has_expired(now):
                raise SpeakerNotFoundError(name)
            columns = changes.columns(before)
            after = dataclasses.replace(before, **columns)
            if "expires_at" in changes.given:
                check_is_to_come(after.expires_at, now)
            if after.name_key != before.name_key:
                taken = speakers.find_named(db, tenant, after.name_key)
                if taken is not None:
                    raise SpeakerExistsError(taken.name, hint=CHOOSE_ANOTHER)
                if tenant == DEFAULT_TENANT:
                    stock_files.rename(db, before.name_key, after.name_key)
            speakers.change(db, after, columns)
            deletion = None
            if _spoken(after) != _spoken(before):
                deletion = deletions.add(db, before.audio_sha256, tenant=tenant)
        return Registered(record=after, replaced=before, deletion=deletion)

    def delete(self, name: str, tenant: str = DEFAULT_TENANT) -> Deletion:
        """Delete a speaker: from here on nobody finds it.

        Its files are still to be removed, by `SpeakerStore.remove_files`, and what
        participants remember is still to be confirmed; that this is to be done is
        committed.

        Raises: SpeakerNotFoundError: No speaker has this name or id.
        """
        with self._database.write() as db:
            self._delete_old_deletions(db)
            return self._delete(db, _find(db, name, tenant))

    def delete_expired(self, limit: int) -> list[Deletion]:
        """Delete speakers whose end has come, so many at most, as `delete` does."""
        with self._database.write() as db:
            self._delete_old_deletions(db)
            over = speakers.expired(db, schema.now(db), limit)
            return [self._delete(db, record) for record in over]

    def _delete(self, db: Connection, record: SpeakerRecord) -> Deletion:
        tenant, name_key = record.tenant, record.name_key
        speakers.delete(db, record)
        stored_files.remove_unowned(db, record.audio_sha256)
        deletions.delete_finished(db, tenant, name_key)
        deletion = deletions.add(
            db,
            record.audio_sha256,
            tenant=tenant,
            hashed=deletions.name_hash(tenant, name_key),
            public_id=record.speaker_id,
        )
        if tenant == DEFAULT_TENANT:
            stock_files.mark_deleted(db, name_key, deletion.id)
        return deletion

    def _delete_old_deletions(self, db: Connection) -> None:
        """Delete rows that nobody asked after, now and then: it goes through all."""
        now = time.monotonic()
        if now >= self._delete_old_next:
            self._delete_old_next = now + _DELETE_OLD_SECONDS
            deletions.delete_old(db)

    def _consent_id(self, db: Connection, new: NewSpeaker) -> str | None:
        found = None
        if is_consent_id(new.consent):
            found = consents.find(db, new.consent, new.tenant)
        if found is None and self._needs_recording:
            raise ConsentRequiredError
        return None if found is None else found.consent_id

    def _check_room(self, db: Connection, tenant: str, limits: Limits) -> None:
        """See that one more may be registered."""
        limit = limits.max_voices
        used = owners.of_tenant(db, tenant).num_voices
        if limit is not None and used >= limit:
            raise SpeakerLimitError(limit, is_tenants=True)
        if self._max_speakers and speakers.at_least(db, self._max_speakers):
            raise SpeakerLimitError(self._max_speakers)


def _find(db: Connection, name: str, tenant: str) -> SpeakerRecord:
    if (found := speakers.find(db, tenant, name)) is None:
        raise SpeakerNotFoundError(name)
    return found


def _replace(
    db: Connection,
    new: NewSpeaker,
    replaced: SpeakerRecord | None,
    consent_id: str | None = None,
) -> Registered:
    record = speakers.replace(db, new, consent_id)
    deletion = None
    if replaced is not None and _spoken(replaced) != _spoken(record):
        sha = replaced.audio_sha256
        if sha is not None:
            # Deleted even where others have the audio: what was remembered of it may
            # hold the transcript of the one that is gone.
            stored_files.remove_unowned(db, sha)
            deletion = deletions.add(db, sha, tenant=record.tenant)
    return Registered(record=record, replaced=replaced, deletion=deletion)


def _brings_back(db: Connection, new: NewSpeaker, old: SpeakerRecord) -> bool:
    """Whether it is the same clip and transcript, and the clip was lost."""
    sha = old.audio_sha256
    if sha is None or (new.audio_sha256, new.ref_text) != (sha, old.ref_text):
        return False
    file = stored_files.find(db, sha, AUDIO_KIND)
    return file is None or file.is_suspect


def _sounds_the_same(db: Connection, new: NewSpeaker, old: SpeakerRecord) -> bool:
    """Whether a speaker who is still there has the same clip, or embedding."""
    if new.embedding is None or old.audio_sha256 is not None:
        return new.audio_sha256 == old.audio_sha256
    kept = speakers.embedding(db, old.generation)
    return kept is not None and pack_embedding(kept) == pack_embedding(new.embedding)


def _with_stock_files(db: Connection, done: Registered) -> Registered:
    """Leave stock's files of whoever was replaced to the deletion.

    Going back to stock is not to bring back a person who was replaced by another. So
    files of the same clip or embedding stay, and those that a file of stock's own
    replaced: a server that merely starts removes nothing of stock's.
    """
    new = done.record
    if done.replaced is None or new.tenant != DEFAULT_TENANT:
        return done
    if not stock_files.has_files(db, new.name_key):
        return done
    deletion = done.deletion or deletions.add(db, None, tenant=new.tenant)
    stock_files.mark_deleted(db, new.name_key, deletion.id)
    return dataclasses.replace(done, deletion=deletion)


def _spoken(record: SpeakerRecord) -> tuple[str | None, str | None]:
    """What processes remember of a speaker's prompts by."""
    return record.audio_sha256, record.ref_text


def remove_files(blobs: BlobOwner, database: Database, deletion: Deletion) -> None:
    """Remove all of a deletion from disk, and write down that it is gone.

    Stock's files of a voice that was imported go as well. What was registered or kept
    under the same address since keeps its files. Killed at any point it can be called
    again: until the last transaction the deletion says that there may be something.

    Raises: StorageError: Something is left; call it again.
    """
    root = blobs.files.root
    with database.write() as db:
        found = deletions.get(db, deletion.id)
        if found is None or found.files_removed:
            return
        if (sha := found.deletion.audio_sha256) is not None:
            stored = {file.kind for file in stored_files.of_audio(db, sha)}
            if owners.is_owned(db, sha):  # by somebody with the same clip
                stored.add(AUDIO_KIND)
            elif AUDIO_KIND not in stored:
                stored_files.remove(db, sha)
                stored.clear()
            blobs.discard(db, sha, stored, deletion.id)
        imported = stock_files.to_remove(db, deletion.id)
    blobs.finish_discard(sha, deletion.id)
    for file in imported:
        # Of the directory: a file is called after a voice, and logs show these errors.
        with storage_errors(root), suppress(FileNotFoundError):
            stat = (root / file.file_name).stat()
            # Another time or size: stock has written another voice there since.
            if (stat.st_mtime_ns, stat.st_size) == (file.mtime_ns, file.size):
                (root / file.file_name).unlink()
                sync_directory(root)
    with database.write() as db:
        for file in imported:
            stock_files.delete_file_name(db, file.file_name)
        deletions.files_are_removed(db, deletion.id)
    database.backend.wipe_log()
