"""Registering, changing and deleting speakers, each in one transaction."""

import dataclasses
import time
from dataclasses import dataclass

from sqlalchemy import Connection

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.catalogue import (
    changed_speakers,
    consents,
    deletions,
    dialect,
    imports,
    owners,
    speakers,
    stored_files,
    tenant_encodings,
    tenant_usage,
)
from vllm_tts_cache.catalogue.changes import SpeakerChanges
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.details import check_is_to_come
from vllm_tts_cache.catalogue.imports import ImportedFile
from vllm_tts_cache.catalogue.names import is_storable
from vllm_tts_cache.catalogue.record import (
    AUDIO_KIND,
    DEFAULT_TENANT,
    PREVIEW_PREFIX,
    NewSpeaker,
    Segment,
    SpeakerRecord,
    pack_embedding,
)
from vllm_tts_cache.config import RegistrationPolicy
from vllm_tts_cache.errors import (
    CHOOSE_ANOTHER,
    ConsentRequiredError,
    PinLimitError,
    SpeakerExistsError,
    SpeakerLimitError,
    SpeakerNotFoundError,
)
from vllm_tts_cache.store.preview_kinds import of_other_tenants
from vllm_tts_cache.store.writing import Owner, Writer
from vllm_tts_cache.tenants import NO_LIMITS, Limits

_DELETE_OLD_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The new record, and what its name took over.

    Attributes:
        deletion: Of the replaced one, if it had audio or a file of stock's and is not
            registered anew as it was: still to be carried out by
            `SpeakerStore.remove_files`.
        change: Which all have to hear of, see `changed_speakers`; 0 if nobody has to.
    """

    record: SpeakerRecord
    replaced: SpeakerRecord | None
    deletion: Deletion | None
    change: int = 0


class Registrations:
    """Changes who is registered; see `SpeakerStore`, which it is a part of.

    Args:
        database: The catalogue's.
        writer: Stores the audio in the transaction that registers it.
        max_speakers: As of the store.
        policy: As of the store.
        needs_recording: Whether a voice stands on a consent recording that is here.
        max_pinned: Pinned speakers at most, all tenants together.
    """

    def __init__(
        self,
        database: Database,
        writer: Writer,
        *,
        max_speakers: int,
        policy: RegistrationPolicy,
        needs_recording: bool,
        max_pinned: int,
    ):
        self._database = database
        self._writer = writer
        self._max_speakers = max_speakers
        self._policy: RegistrationPolicy = policy
        self._needs_recording = needs_recording
        self._max_pinned = max_pinned
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
            PinLimitError: It is pinned, and as many are as may be.
            ConsentRequiredError: A recording is needed, and the consent names none.
            StorageFullError: There is no space left; nothing was changed.
        """

        def commit(db: Connection) -> Registered:
            now = dialect.now(db)
            check_is_to_come(new.expires_at, now)
            replaced = speakers.find_named(db, new.tenant, new.name_key)
            change = 0
            if replaced is not None and replaced.has_expired(now):
                # Nobody finds it any more: its id and its name are free. What is
                # left of it is removed by whoever adopts deletions.
                self._delete(db, replaced)
                change = changed_speakers.newest(db)
                replaced = None
            if replaced is not None and self._stays(db, replaced, new):
                raise SpeakerExistsError(replaced.name)
            if replaced is not None and is_new:
                raise SpeakerExistsError(replaced.name, hint=CHOOSE_ANOTHER)
            if replaced is None:
                self._check_room(db, new.tenant, limits)
            is_same = replaced is not None and _sounds_the_same(db, new, replaced)
            done = _replace(db, new, replaced, self._consent_id(db, new))
            if not is_same:
                done = _with_stock_files(db, done)
            self._check_pins(db, done.record, limits)
            return dataclasses.replace(done, change=done.change or change)

        if audio is None:
            with self._database.write() as db:
                return commit(db)
        owner = Owner(tenant=new.tenant, max_audio_bytes=limits.max_audio_bytes)
        return self._writer.keep(audio, Segment.REGISTERED, commit, owner=owner)

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
            replaced = speakers.find_named(db, new.tenant, new.name_key)
            return None, _replace(db, new, replaced).deletion

        try:
            if audio is not None:
                return self._writer.keep(
                    audio,
                    Segment.REGISTERED,
                    commit,
                    owner=Owner(tenant=new.tenant),
                    is_bounded=False,
                )
            with self._database.write() as db:
                return commit(db)
        except _RefusedError as exc:
            return str(exc), None

    def change(
        self,
        name: str,
        changes: SpeakerChanges,
        tenant: str = DEFAULT_TENANT,
        limits: Limits = NO_LIMITS,
    ) -> Registered:
        """Change what is written beside a speaker, its name included.

        Raises:
            SpeakerNotFoundError: No speaker has this name or id.
            SpeakerExistsError: Another one has the new name.
            PinLimitError: It is to be pinned, and as many are as may be.
            InvalidSpeakerError: The speaker cannot be changed so.
        """
        with self._database.write() as db:
            before = _find(db, name, tenant)
            now = dialect.now(db)
            if before.has_expired(now):
                raise SpeakerNotFoundError(name)
            after = changes.applied_to(before)
            if "expires_at" in changes.given:
                check_is_to_come(after.expires_at, now)
            if after.name_key != before.name_key:
                taken = speakers.find_named(db, tenant, after.name_key)
                if taken is not None:
                    raise SpeakerExistsError(taken.name, hint=CHOOSE_ANOTHER)
                if tenant == DEFAULT_TENANT:
                    imports.rename(db, before.name_key, after.name_key)
            speakers.change(db, before, after, changes.columns(after))
            change = changed_speakers.note(db, before.speaker_id)
            if not before.is_pinned:
                self._check_pins(db, after, limits)
            deletion = None
            if _spoken(after) != _spoken(before):
                if before.audio_sha256 is not None:
                    delete_previews(db, before.audio_sha256, tenant)
                deletion = deletions.add(db, before.audio_sha256, tenant=tenant)
        return Registered(
            record=after, replaced=before, deletion=deletion, change=change
        )

    def delete(self, name: str, tenant: str = DEFAULT_TENANT) -> Deletion:
        """Delete a speaker: from here on nobody finds it.

        Its files are still to be removed, by `SpeakerStore.remove_files`, and what
        participants remember is still to be confirmed; that this is to be done is
        committed.

        Raises:
            SpeakerNotFoundError: No speaker has this name or id.
        """
        with self._database.write() as db:
            self._delete_old_deletions(db)
            return self._delete(db, _find(db, name, tenant))

    def delete_expired(self, limit: int) -> list[Deletion]:
        """Delete speakers whose end has come, so many at most, as `delete` does."""
        with self._database.write() as db:
            self._delete_old_deletions(db)
            over = speakers.expired(db, dialect.now(db), limit)
            return [self._delete(db, record) for record in over]

    def _delete(self, db: Connection, record: SpeakerRecord) -> Deletion:
        tenant, name_key = record.tenant, record.name_key
        speakers.delete(db, record)
        changed_speakers.note(db, record.speaker_id)
        deletions.delete_finished(db, tenant, name_key)
        deletion = deletions.add(
            db,
            deleted_audio(db, record.audio_sha256, tenant),
            tenant=tenant,
            hashed=deletions.name_hash(tenant, name_key),
            public_id=record.speaker_id,
        )
        if tenant == DEFAULT_TENANT:
            imports.mark_deleted(db, name_key, deletion.id)
        return deletion

    def _delete_old_deletions(self, db: Connection) -> None:
        """Delete rows that nobody asked after, now and then: it goes through all."""
        now = time.monotonic()
        if now >= self._delete_old_next:
            self._delete_old_next = now + _DELETE_OLD_SECONDS
            deletions.delete_old(db)

    def _consent_id(self, db: Connection, new: NewSpeaker) -> str | None:
        found = consents.find(db, new.consent, new.tenant)
        if found is None and self._needs_recording:
            raise ConsentRequiredError
        return None if found is None else found.consent_id

    def _check_pins(
        self, db: Connection, record: SpeakerRecord, limits: Limits
    ) -> None:
        """Undo a transaction that has pinned one more than may be."""
        if not record.is_pinned:
            return
        limit = limits.max_pinned
        used = tenant_usage.of_tenant(db, record.tenant).num_pinned
        if limit is not None and used > limit:
            raise PinLimitError(limit, is_tenants=True)
        if speakers.num_pinned(db) > self._max_pinned:
            raise PinLimitError(self._max_pinned)

    def _stays(self, db: Connection, old: SpeakerRecord, new: NewSpeaker) -> bool:
        """Whether a speaker may not be registered over."""
        return self._policy == "immutable" and not _brings_back(db, new, old)

    def _check_room(self, db: Connection, tenant: str, limits: Limits) -> None:
        """See that one more may be registered."""
        limit = limits.max_voices
        used = tenant_usage.of_tenant(db, tenant).num_voices
        if limit is not None and used >= limit:
            raise SpeakerLimitError(limit, is_tenants=True)
        if self._max_speakers and speakers.at_least(db, self._max_speakers):
            raise SpeakerLimitError(self._max_speakers)


class _RefusedError(Exception):
    """A voice of stock's is not imported; the message says why."""


def _find(db: Connection, name: str, tenant: str) -> SpeakerRecord:
    found = speakers.find(db, tenant, name) if is_storable(name) else None
    if found is None:
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
    change = 0 if replaced is None else changed_speakers.note(db, replaced.speaker_id)
    if replaced is not None and _spoken(replaced) != _spoken(record):
        sha = deleted_audio(db, replaced.audio_sha256, record.tenant)
        if sha is not None:
            deletion = deletions.add(db, sha, tenant=record.tenant)
    return Registered(
        record=record, replaced=replaced, deletion=deletion, change=change
    )


def _brings_back(db: Connection, new: NewSpeaker, old: SpeakerRecord) -> bool:
    """Whether it is the same clip and transcript, and the clip was lost."""
    sha = old.audio_sha256
    if sha is None or (new.audio_sha256, new.ref_text) != (sha, old.ref_text):
        return False
    return stored_files.find(db, sha, AUDIO_KIND) is None


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
    if not imports.has_files(db, new.name_key):
        return done
    deletion = done.deletion or deletions.add(db, None, tenant=new.tenant)
    imports.mark_deleted(db, new.name_key, deletion.id)
    return dataclasses.replace(done, deletion=deletion)


def _spoken(record: SpeakerRecord) -> tuple[str | None, str | None]:
    """What processes remember of a speaker's prompts by."""
    return record.audio_sha256, record.ref_text


def deleted_audio(db: Connection, audio_sha256: str | None, tenant: str) -> str | None:
    """The audio of what a tenant deleted; if nobody else has it, its rows go.

    It is told even where others have it: what was remembered of it may hold the
    transcript of the one that is gone.
    """
    if audio_sha256 is None:
        return None
    having = owners.tenants_of(db, audio_sha256)
    if not having:
        stored_files.remove(db, audio_sha256)
        return audio_sha256
    delete_previews(db, audio_sha256, tenant)
    if tenant not in having:
        tenant_encodings.delete(db, tenant, audio_sha256)
    return audio_sha256


def delete_previews(
    db: Connection, audio_sha256: str, tenant: str, *, keep: int = 0
) -> list[str]:
    """Delete a tenant's previews of an audio but the newest; returns their kinds.

    That is their rows: the files go with a deletion, or are the caller's to remove.
    What other tenants have that have the audio too is theirs.
    """
    others = owners.tenants_of(db, audio_sha256) - {tenant}
    is_theirs = of_other_tenants(others)
    files = stored_files.of_audio(db, audio_sha256)
    kinds = [
        file.kind
        for file in files
        if file.kind.startswith(PREVIEW_PREFIX) and not is_theirs(file.kind)
    ]
    if old := kinds[: max(0, len(kinds) - keep)]:
        stored_files.remove(db, audio_sha256, old)
    return old
