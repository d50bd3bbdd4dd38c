"""Registering, changing and deleting speakers, each in one transaction."""

import dataclasses
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from msgspec import structs
from sqlalchemy import Connection, bindparam, select

from vllm_tts_cache import errors
from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import AUDIO, Segment
from vllm_tts_cache.catalogue import (
    aliases,
    deletions,
    owners,
    schema,
    speakers,
    stored_files,
)
from vllm_tts_cache.catalogue.database import Database, with_ballast
from vllm_tts_cache.catalogue.deletions import KEPT_SECONDS, Deletion
from vllm_tts_cache.catalogue.names import fold, is_consent_id
from vllm_tts_cache.catalogue.records import (
    DEFAULT_TENANT,
    IdempotencyKey,
    NewSpeaker,
    SpeakerChanges,
    SpeakerRecord,
    check_is_to_come,
    pack_embedding,
)
from vllm_tts_cache.catalogue.schema import done_request
from vllm_tts_cache.config import RegistrationPolicy, Settings
from vllm_tts_cache.files import storage_errors, sync_directory
from vllm_tts_cache.store import consents
from vllm_tts_cache.store.blobs import BlobOwner
from vllm_tts_cache.store.consents import NewConsent
from vllm_tts_cache.store.writer import Writer
from vllm_tts_cache.tenants import NO_LIMITS, Limits, Tenant

_DELETE_OLD_SECONDS = 60.0
_KEY_HASH = done_request.c.key_hash
_DONE = select(done_request).where(bindparam("key_hash") == _KEY_HASH)
# Each new row deletes a few old ones, so that no write waits for many.
_OLD_DONE = select(_KEY_HASH).where(done_request.c.done_at < bindparam("end")).limit(9)
_DELETE_OLD_DONE = done_request.delete().where(_KEY_HASH.in_(_OLD_DONE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A new or changed record.

    Attributes:
        deletion: The replaced speaker's, which `SpeakerStore.remove_files` still has to
            carry out; None if it had no audio and no file of stock's, or if it is
            registered again unchanged.
    """

    record: SpeakerRecord
    deletion: Deletion | None = None


class Registrations:
    """Registers, changes and deletes speakers; a part of `SpeakerStore`.

    The settings say how many speakers all tenants may have together, whether a
    registered name may be replaced, and whether a consent recording is required.
    """

    def __init__(self, database: Database, writer: Writer, settings: Settings):
        self.database = database
        self._writer = writer
        self._max_speakers = settings.max_uploaded
        self.policy: RegistrationPolicy = settings.registration_policy
        self._needs_recording = settings.consent == "recording"
        self._delete_old_next = 0.0

    def register(
        self,
        new: NewSpeaker,
        audio: DecodedAudio | None,
        *,
        is_new: bool = False,
        limits: Limits = NO_LIMITS,
        recording: NewConsent | None = None,
        encodings: Mapping[str, bytes] = {},
    ) -> Registered:
        """Register a speaker; readers see the old one until they see the new one.

        If a request with its key did that before, return its speaker as it is now.

        ``new`` has an ``audio_sha256`` exactly if there is audio. With ``is_new`` a
        taken name is refused, whatever the policy. The recording is the speaker's
        consent, stored unless the tenant has its audio. The encodings of the audio are
        found with the speaker or not at all; see `Writer.store_audio`.

        Raises:
            AlreadyDoneError: A request with the key did it; the speaker is deleted.
            InvalidSpeakerError: A different request had the key.
            SpeakerExistsError: The name is taken and must not be replaced.
            SpeakerLimitError: The name is new, and a limit of speakers is reached.
            AudioBudgetError: The registered audio would exceed its budget.
            ConsentRequiredError: A recording is needed, and the consent names none.
            StorageFullError: No space is left; nothing was changed.
        """

        def commit(db: Connection) -> Registered:
            _check_not_done(db, new.idempotency_key)
            now = schema.now(db)
            check_is_to_come(new.expires_at, now)
            replaced = speakers.find_named(db, new.tenant, new.name_key)
            if replaced is not None and replaced.has_expired(now):
                # It cannot be found any more: its id and its name are free. An API
                # process that adopts the deletion removes its files.
                self._delete(db, replaced)
                replaced = None
            if replaced is None:
                self._check_room(db, new.tenant, limits)
            elif self.policy == "immutable" and not _brings_back(db, new, replaced):
                raise errors.SpeakerExistsError(replaced.name)
            elif is_new:
                hint = errors.CHOOSE_ANOTHER
                raise errors.SpeakerExistsError(replaced.name, hint=hint)
            is_other = replaced is not None and not _sounds_the_same(db, new, replaced)
            checked = new
            if recording is not None:
                sha = recording.audio.audio.audio_sha256
                kept = consents.of_audio(db, sha, new.tenant)
                if kept is None:
                    kept = consents.insert(db, recording, limits, self._max_speakers)
                else:  # `store_audio` counts it once more
                    owners.disown(db, new.tenant, sha)
                checked = dataclasses.replace(new, consent=kept.consent_id)
            done = replace(db, checked, replaced, self._consent_id(db, checked))
            _record_done(db, new.idempotency_key, done.record.speaker_id)
            return _with_stock_files(db, done) if is_other else done

        owner = Tenant(name=new.tenant, limits=limits)
        try:
            return self._writer.store_audio(
                audio,
                Segment.REGISTERED,
                commit,
                recording=None if recording is None else recording.audio,
                encodings=encodings,
                owner=owner,
            )
        except errors.AlreadyDoneError as exc:
            with self.database.read() as db:
                record = speakers.find(db, new.tenant, exc.speaker_id)
            if record is None:
                raise
            return Registered(record=record)

    def change(
        self, name: str, changes: SpeakerChanges, tenant: str = DEFAULT_TENANT
    ) -> Registered:
        """Change a speaker's metadata, its name included.

        Raises:
            SpeakerNotFoundError: No speaker has this name or id.
            SpeakerExistsError: Another speaker has the new name.
            InvalidSpeakerError: A new value is not valid for this speaker.
        """
        with self.database.write() as db:
            before = _find(db, name, tenant)
            now = schema.now(db)
            if before.has_expired(now):
                raise errors.SpeakerNotFoundError(name)
            columns = changes.columns(before, now)
            after = structs.replace(before, **columns)
            if "expires_at" in changes.given:
                check_is_to_come(after.expires_at, now)
            if (key := after.name_key) != before.name_key:
                aliases.check_free(db, tenant, before.generation, key)
                if (over := speakers.find(db, tenant, key)) and over.name_key == key:
                    self._delete(db, over)  # as `register` does
                if tenant == DEFAULT_TENANT:
                    deletions.rename_stock_files(db, before.name_key, key)
            speakers.change(db, after, columns)
            deletion = None
            if _spoken(after) != _spoken(before):
                deletion = deletions.add(db, before.audio_sha256, tenant=tenant)
            elif {"name_key", "extras_json"} & columns.keys():
                _have_rows_deleted(db, tenant)
        return Registered(record=after, deletion=deletion)

    @with_ballast
    def delete(
        self, name: str, tenant: str = DEFAULT_TENANT, key: IdempotencyKey | None = None
    ) -> Deletion:
        """Delete a speaker: once this returns, no lookup finds it.

        `SpeakerStore.remove_files` still has to remove its files, and participants to
        confirm that their memory is empty of it; the deletion that this returns is
        committed, so both can be done after a crash.

        Raises:
            AlreadyDoneError: The request was done before.
            InvalidSpeakerError: A different request had the key; the name is an alias.
            SpeakerNotFoundError: No speaker has this name or id.
        """
        with self.database.write() as db:
            if key is not None:
                _check_not_done(db, key)
            self._delete_old_deletions(db)
            record = _find(db, name, tenant)
            is_named = record.name_key, record.speaker_id
            if record.extras_json and fold(name) not in is_named:
                reason = f"it is an alias of {record.name!r}; PATCH the aliases of that"
                raise errors.InvalidSpeakerError("name", f"{reason}, or DELETE it")
            if key is not None:
                _record_done(db, key, record.speaker_id)
            return self._delete(db, record)

    @with_ballast
    def delete_expired(self, limit: int) -> list[Deletion]:
        """Delete expired speakers as `delete` does, at most ``limit`` of them."""
        with self.database.write() as db:
            self._delete_old_deletions(db)
            over = speakers.expired(db, schema.now(db), limit)
            return [self._delete(db, record) for record in over]

    def _delete(self, db: Connection, record: SpeakerRecord) -> Deletion:
        tenant, name_key, sha = record.tenant, record.name_key, record.audio_sha256
        speakers.delete(db, record)
        stored_files.remove_unowned(db, sha)
        deletions.delete_finished(db, tenant, name_key)
        known_by = {"name_key": name_key, "public_id": record.speaker_id}
        deletion = deletions.add(db, sha, tenant=tenant, **known_by)
        if tenant == DEFAULT_TENANT:
            deletions.add_stock_files(db, name_key, deletion.id)
        return deletion

    def _delete_old_deletions(self, db: Connection) -> None:
        """Delete old rows of deletions, at most once a minute: it reads all of them."""
        if (now := time.monotonic()) >= self._delete_old_next:
            self._delete_old_next = now + _DELETE_OLD_SECONDS
            deletions.delete_old(db)

    def _consent_id(self, db: Connection, new: NewSpeaker) -> str | None:
        if is_consent_id(new.consent) and consents.find(db, new.consent, new.tenant):
            return new.consent
        if self._needs_recording:
            raise errors.ConsentRequiredError
        return None

    def _check_room(self, db: Connection, tenant: str, limits: Limits) -> None:
        """Raise SpeakerLimitError if a limit is reached."""
        limit = limits.max_voices
        if limit is not None and owners.of_tenant(db, tenant).num_voices >= limit:
            raise errors.SpeakerLimitError(limit, is_tenants=True)
        if self._max_speakers and owners.num_voices(db) >= self._max_speakers:
            raise errors.SpeakerLimitError(self._max_speakers)


def _check_not_done(db: Connection, key: IdempotencyKey | None) -> None:
    """Refuse a request whose key the catalogue has.

    Raises:
        AlreadyDoneError: The same request was done.
        InvalidSpeakerError: A different request had the key.
    """
    if key is None or (row := db.execute(_DONE, asdict(key)).first()) is None:
        return
    if row.request_hash == key.request_hash:
        raise errors.AlreadyDoneError(row.speaker_id)
    reason = "another request was sent with it; send a new one with each request"
    raise errors.InvalidSpeakerError("Idempotency-Key", reason)


def _record_done(db: Connection, key: IdempotencyKey | None, speaker_id: str) -> None:
    """Record that a request with a key is done, for a day at least."""
    if key is not None:
        now = schema.now(db)
        db.execute(_DELETE_OLD_DONE, {"end": now - KEPT_SECONDS})
        row = {**asdict(key), "speaker_id": speaker_id, "done_at": now}
        db.execute(done_request.insert(), row)


def _find(db: Connection, name: str, tenant: str) -> SpeakerRecord:
    if (found := speakers.find(db, tenant, name)) is None:
        raise errors.SpeakerNotFoundError(name)
    return found


def replace(
    db: Connection,
    new: NewSpeaker,
    replaced: SpeakerRecord | None,
    consent_id: str | None = None,
) -> Registered:
    """Insert a speaker in the place of one; add the deletion that this needs."""
    record = speakers.replace(db, new, replaced, consent_id)
    deletion = None
    if replaced is not None:
        sha = replaced.audio_sha256
        if sha is not None and _spoken(replaced) != _spoken(record):
            # Deleted even if other voices have the audio: prompts that processes cache
            # for it may hold the transcript of the replaced one.
            stored_files.remove_unowned(db, sha)
            deletion = deletions.add(db, sha, tenant=record.tenant)
        elif sha is None or replaced.extras_json != record.extras_json:
            _have_rows_deleted(db, record.tenant)
    return Registered(record=record, deletion=deletion)


def _brings_back(db: Connection, new: NewSpeaker, old: SpeakerRecord) -> bool:
    """Whether clip and transcript are the same, and the stored clip was lost."""
    sha = old.audio_sha256
    if sha is None or (new.audio_sha256, new.ref_text) != (sha, old.ref_text):
        return False
    file = stored_files.find(db, sha, AUDIO)
    return file is None or file.is_suspect


def _sounds_the_same(db: Connection, new: NewSpeaker, old: SpeakerRecord) -> bool:
    """Whether the new speaker has the clip, or the embedding, of the old one."""
    if new.embedding is None or old.audio_sha256 is not None:
        return new.audio_sha256 == old.audio_sha256
    kept = speakers.embedding(db, old)
    return kept is not None and pack_embedding(kept) == pack_embedding(new.embedding)


def _with_stock_files(db: Connection, done: Registered) -> Registered:
    """Let the deletion remove stock's files of the replaced speaker.

    Going back to stock must not bring back a person whom another replaced. Callers skip
    this for the same clip or embedding, and for a voice that another file of stock's
    replaced: a server that only starts removes no file of stock's.
    """
    new = done.record
    if new.tenant != DEFAULT_TENANT or not deletions.has_stock_files(db, new.name_key):
        return done
    deletion = done.deletion or deletions.add(db, None, tenant=new.tenant)
    deletions.add_stock_files(db, new.name_key, deletion.id)
    return dataclasses.replace(done, deletion=deletion)


def _have_rows_deleted(db: Connection, tenant: str) -> None:
    """Have servers delete the rows that they keep for an outage of the database."""
    deletion = deletions.add(db, None, tenant=tenant)
    deletions.files_are_removed(db, deletion.id)  # there are none


def _spoken(record: SpeakerRecord) -> tuple[str | None, str | None]:
    """Return what processes cache a speaker's prompts under: audio and transcript."""
    return record.audio_sha256, record.ref_text


def remove_files(blobs: BlobOwner, database: Database, deletion: Deletion) -> None:
    """Remove a deletion's files, also stock's of an imported voice, and record it.

    Audio that was stored again since keeps its files. If the process is killed this can
    be called again: until the last transaction the row says that files may be left.

    Raises: StorageError: Files are left; call it again.
    """
    root = blobs.files.root
    with database.write() as db:
        found = deletions.get(db, deletion.id)
        if found is None or found.files_removed:
            return
        if (sha := found.audio_sha256) is not None:
            stored = {file.artifact for file in stored_files.of_audio(db, sha)}
            if owners.is_owned(db, sha):  # another voice has the same clip
                stored.add(AUDIO)
            elif AUDIO not in stored:
                stored_files.remove(db, sha)
                stored.clear()
            blobs.discard(db, sha, stored, deletion.id)
        imported = deletions.stock_files(db, deletion.id)
    blobs.finish_discard(sha, deletion.id)
    for name, mtime_ns, size in imported:
        # Errors name the directory: they are logged, and a file name has a voice's.
        with storage_errors(root), suppress(FileNotFoundError):
            stat = (root / name).stat()
            # With another time or size it is a file that stock wrote since.
            if (stat.st_mtime_ns, stat.st_size) == (mtime_ns, size):
                (root / name).unlink()
                sync_directory(root)
    with database.write() as db:
        for name, _, _ in imported:
            deletions.stock_file_is_removed(db, name)
        deletions.files_are_removed(db, deletion.id)
    database.backend.wipe_log()
