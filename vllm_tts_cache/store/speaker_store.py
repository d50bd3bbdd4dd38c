"""The owner of ``SPEAKER_SAMPLES_DIR``: every file and every row is its doing.

What must hold, whenever a process dies:

* A file is moved to its name and its row is written in one write transaction. A crash
  between the two leaves a file without a row, which `recover` removes.
* A registration commits speaker, file and what it replaced at once. A deletion commits
  that it is to be done, and is then done; what is left is done by whoever recovers.
* Files are removed where the catalogue, in the same transaction, knows no owner.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from cachetools import TTLCache

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue import (
    deletions,
    owners,
    pages,
    schema,
    speakers,
    stored_files,
)
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion, DeletionProgress
from vllm_tts_cache.catalogue.names import is_storable
from vllm_tts_cache.catalogue.owners import TenantUsage
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.records import (
    AUDIO_KIND,
    DEFAULT_TENANT,
    Segment,
    SpeakerRecord,
)
from vllm_tts_cache.catalogue.stored_files import Usage
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import EncodingCorruptError, SourceCorruptError, StorageError
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.store import audio_file, binding, recovery
from vllm_tts_cache.store.binding import StoreId
from vllm_tts_cache.store.blobs import BlobOwner, BucketOwner
from vllm_tts_cache.store.consents import Consents
from vllm_tts_cache.store.encoding import Encoding, EncodingKey, encoding_from_bytes
from vllm_tts_cache.store.participants import (
    LeasedParticipants,
    LockedParticipants,
    Participants,
)
from vllm_tts_cache.store.reading import BlobReader
from vllm_tts_cache.store.registering import Registrations, remove_files
from vllm_tts_cache.store.verification import Verification
from vllm_tts_cache.store.writer import Writer, disk_budgets

T = TypeVar("T")

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

# Recency to the minute is enough to choose what to evict, and spares a write per use.
_TOUCH_INTERVAL_SECONDS = 60.0
_MAX_TOUCHED = 10_000
_KEYS_PER_LOOK = 1000
_MAX_NAMED = 100_000
_NAMES_PER_READ = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSpeaker:
    """A registered speaker.

    Attributes:
        fingerprints: Of the encoders whose encoding of its audio is stored.
    """

    record: SpeakerRecord
    fingerprints: frozenset[str]


class SpeakerStore:
    """Speakers, their audio and its encodings, shared by the processes of one host.

    Every method may be called from any thread and raises StorageError where the disk
    or the catalogue fails. What returns has been committed.

    Args:
        settings: Where, and how much.
        database: The catalogue's.
        reader: Of the stored bytes.
        blobs: Their owner, which stores and removes them.
        store_id: What processes compare that must use the same store.
        is_local: Whether only this host has the catalogue, so that a look takes
            microseconds and may be taken on an event loop.

    Attributes:
        directory: ``SPEAKER_SAMPLES_DIR``.
        files: Those in it: the store's, or this machine's copies of a bucket's objects.
        copies: This machine's copies of a bucket's objects; None without a bucket.
        writer: Stores bytes, and keeps them within their budgets.
        registrations: Registers, changes and deletes speakers.
        consents: Consent recordings.
        participants: The processes that confirm deletions; this one may be among them.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        reader: BlobReader,
        blobs: BlobOwner,
        *,
        store_id: StoreId,
        is_local: bool,
    ):
        self.files, self.database, self.blobs = blobs.files, database, blobs
        self.directory, self.store_id = blobs.files.root, store_id
        self.is_local = is_local
        self._reader = reader
        self.copies = blobs.copies if isinstance(blobs, BucketOwner) else None
        self.writer = Writer(blobs, reader, database, disk_budgets(settings))
        self.registrations = Registrations(database, self.writer, settings)
        self.consents = Consents(
            database, self.writer, max_recordings=settings.max_uploaded
        )
        if database.backend.has_leases:
            self.participants: Participants = LeasedParticipants(
                database, settings.catalogue_grace_seconds
            )
        else:
            self.participants = LockedParticipants(self.files.root, database)
        self._verification = Verification(database, blobs)
        # Whose use this process has just written down.
        self._touched = TTLCache[str, None](_MAX_TOUCHED, _TOUCH_INTERVAL_SECONDS)
        self._touching = threading.Lock()

    # --- the API process

    def find(self, name: str, tenant: str = DEFAULT_TENANT) -> StoredSpeaker | None:
        """The speaker of that name or id; None if there is none, or none any more.

        One indexed read, on an event loop as well where ``is_local``.

        Raises: StorageBusyError: The catalogue is being opened or recovered just now.
        """
        found = speakers.find_with_kinds(self.database, tenant, name)
        if found is None:
            return None
        record, kinds = found
        if record.expires_at is not None and record.has_expired(self.database.now()):
            return None
        return StoredSpeaker(
            record=record, fingerprints=frozenset(kinds) - {AUDIO_KIND}
        )

    def keep_inline(self, audio: DecodedAudio) -> None:
        """Store audio that came with a request, or count it as used.

        Of what is registered nothing is written. The least recently used inline audio
        goes where this is too much. That it cannot be counted is no error.

        Raises: StorageFullError: There is no space left; nothing was changed.
        """
        sha = audio.audio.audio_sha256
        if not self.writer.is_kept(sha):
            self.writer.keep(audio, Segment.INLINE, lambda _: None)
            return
        with self._touching:
            if sha in self._touched:
                return
            self._touched[sha] = None
        try:
            self.used([sha])
        except StorageError as exc:
            throttled.warn_of("noting a use", "Noting a use: %s", exc.log_text)

    def is_lost(self, record: SpeakerRecord) -> bool:
        """Whether a speaker's reference audio is not there any more, at a look."""
        sha = record.audio_sha256
        return sha is not None and not self.writer.is_kept(sha)

    def has_audio(self, audio_sha256: str) -> bool:
        """Whether the audio is stored, for whomever; reads an index."""
        with self.database.read() as db:
            return stored_files.find(db, audio_sha256, AUDIO_KIND) is not None

    def stored_kinds(self, audio_sha256s: Sequence[str]) -> dict[str, frozenset[str]]:
        """What is stored of each audio: ``AUDIO_KIND``, encoders' fingerprints."""
        with self.database.read() as db:
            found = stored_files.kinds(db, audio_sha256s)
        return {sha: frozenset(kinds) for sha, kinds in found.items()}

    def stored_since(self, file_id: int) -> tuple[int, list[EncodingKey]]:
        """Which encodings were stored after a number, and the number to ask with next.

        Ask with -1 first, which tells only the number. A thousand at most are told at
        once: ask again until there are none.
        """
        with self.database.read() as db:
            if file_id < 0:
                return stored_files.last_id(db), []
            rows = stored_files.since(db, file_id, _KEYS_PER_LOOK)
        keys = [
            EncodingKey(audio_sha256=sha, encoder_fingerprint=kind)
            for _, sha, kind in rows
        ]
        return rows[-1][0] if rows else file_id, keys

    def remove_files(self, deletion: Deletion) -> None:
        """Remove what a deletion leaves on disk; see `registering.remove_files`."""
        remove_files(self.blobs, self.database, deletion)

    def progress(
        self, name: str, tenant: str = DEFAULT_TENANT
    ) -> DeletionProgress | None:
        """How far the deletion of that name is.

        None if there is none, or if it was finished and acknowledged. Participants
        that died are not waited for; we are, if others do not know of us any more.
        """
        if not is_storable(name):
            return None
        with self.database.read() as db:
            found = deletions.of_name(db, tenant, name)
        if found is not None and found.waiting_for:
            self.participants.delete_dead()
            with self.database.read() as db:
                found = deletions.of_name(db, tenant, name)
        if found is not None and not self.participants.is_asked():
            return replace(found, waiting_for=max(found.waiting_for, 1))
        return found

    def has_expired(self) -> bool:
        """Whether the end of some speaker has come; one look into an index."""
        with self.database.read() as db:
            return speakers.have_expired(db, schema.now(db))

    def expired_names(self) -> list[str]:
        """The names of speakers whose end has come and that are still there."""
        with self.database.read() as db:
            return speakers.expired_names(db, schema.now(db), _MAX_NAMED)

    def unfinished_deletions(self) -> list[Deletion]:
        """Deletions whose files are not all removed: somebody was interrupted."""
        with self.database.read() as db:
            return deletions.unfinished(db)

    def acknowledge(self, deletion_id: int) -> None:
        """The client knows that a deletion is finished: delete the row of it."""
        with self.database.write() as db:
            deletions.acknowledge(db, deletion_id)

    # --- what there is

    def records(self, page: Page) -> list[SpeakerRecord]:
        """The speakers of a page, or its first ones if they are too much.

        Only a page without any is certainly the last.

        Raises: InvalidSpeakerError: The cursor is none.
        """
        with self.database.read() as db:
            return pages.records(db, page)

    def names(self, page: Page) -> list[str]:
        """The names of the same page, for less."""
        with self.database.read() as db:
            return pages.names(db, page)

    def iter_names(self, tenant: str = DEFAULT_TENANT) -> Iterator[str]:
        """All names in order; holds no connection while the caller thinks.

        A speaker that comes or goes meanwhile may or may not be among them.
        """
        page = Page(limit=_NAMES_PER_READ, tenant=tenant)
        while found := self.names(page):
            yield from found
            page = replace(page, after=found[-1])

    def last_used(self, limit: int) -> list[tuple[str, str]]:
        """Tenants and names of the speakers that spoke last, the last one first."""
        with self.database.read() as db:
            return stored_files.last_used_speakers(db, limit)

    def num_speakers(self) -> int:
        """How many speakers all tenants have together; reads a row for each tenant."""
        with self.database.read() as db:
            return owners.num_voices(db)

    def usage_of(self, tenant: str) -> TenantUsage:
        """What a tenant has; reads a row."""
        with self.database.read() as db:
            return owners.of_tenant(db, tenant)

    def usage_of_tenants(self) -> dict[str, TenantUsage]:
        """What each tenant has."""
        with self.database.read() as db:
            return owners.of_all(db)

    def speaker_embedding(self, record: SpeakerRecord) -> tuple[float, ...] | None:
        """The registered embedding, float32 values of shape ``(embedding_dim,)``.

        None if the speaker has audio, or was replaced or deleted in the meantime.
        """
        with self.database.read() as db:
            return speakers.embedding(db, record.generation)

    def usage(self) -> dict[Segment, dict[str, Usage]]:
        """What each segment holds, as ``audio`` and ``encodings``; reads four rows."""
        with self.database.read() as db:
            return {
                segment: {
                    "audio": stored_files.used(db, segment, is_audio=True),
                    "encodings": stored_files.used(db, segment, is_audio=False),
                }
                for segment in Segment
            }

    def num_unfinished_deletions(self, tenant: str | None = None) -> int:
        """How many deletions, of all or of a tenant, have something left, somewhere."""
        with self.database.read() as db:
            return deletions.num_unfinished(db, tenant)

    # --- workers

    def read_audio(self, audio_sha256: str) -> ReferenceAudio | None:
        """Read, verify and decode; None if it is not stored.

        Raises:
            SourceCorruptError: The bytes are of no audio of this address. They stay
                until the clip is registered again.
        """
        return self._read_audio(audio_sha256, audio_file.from_bytes)

    def audio_for_client(self, audio_sha256: str) -> tuple[bytes, str] | None:
        """The audio as a file that plays anywhere, and its media type.

        None if it is not stored.

        Raises: as `read_audio`.
        """
        return self._read_audio(audio_sha256, audio_file.to_client)

    def read(self, key: EncodingKey) -> Encoding | None:
        """Read and verify an encoding, from wherever it is; None if it is not stored.

        Raises: EncodingCorruptError: The bytes are wrong.
        """
        return self._read_encoding(self._reader.read, key)

    def read_here(self, key: EncodingKey) -> Encoding | None:
        """As `read`, of what this machine has on disk; None if it has not.

        No query and no lock: the engine's thread may call it.
        """
        return self._read_encoding(self._reader.read_here, key)

    def is_stored(self, key: EncodingKey) -> bool:
        """Whether the encoding's file is here; one look, no query and no lock."""
        return self.files.exists(key.audio_sha256, key.encoder_fingerprint)

    def publish(self, key: EncodingKey, encoding: Encoding) -> bool:
        """Store an encoding, in the place of the one that is there.

        False if its audio is not stored any more: then the encoding is not either.

        Raises: StorageFullError: There is no space left; nothing was changed.
        """
        return self.writer.publish(key, encoding)

    def used(self, audio_sha256s: Iterable[str]) -> None:
        """Count all that is stored of these audios as used now.

        One transaction: call it with many, now and then, from a thread of its own.
        """
        with self.database.write() as db:
            stored_files.touch(db, audio_sha256s)

    # --- maintenance

    def recover(self) -> list[str]:
        """Finish what killed processes began; returns what that was, a line each.

        Walks the whole directory, in slices: for a thread of its own. Others may go
        on using the store.

        Raises:
            StorageError: Something could not be finished, or the directory is not the
                catalogue's (any more), as where it is not mounted: then nothing is.
        """
        self._check_still()
        self.participants.delete_dead()
        return recovery.recover(self.blobs, self.database)

    def repair(self) -> list[str]:
        """Recover, and put right what is stored wrong; a line for each thing done.

        Of a bucket, what the catalogue does not know is removed as well, as there is
        beside an older catalogue, and damaged audio is stored again from the copies of
        this machine. It reads everything.
        """
        lines = self.recover()
        if isinstance(self.blobs, BucketOwner):
            lines += self.blobs.remove_strays()
        return lines + self._verification.repair(self.writer)

    def sweep(self) -> int:
        """Remove objects of a bucket that were let go, and what is left in the log.

        Returns how many objects there were. It is quick where there are none, for a
        task that calls it now and then.
        """
        # Whoever ended a deletion could not empty the log beside somebody who reads,
        # or died before that.
        self.database.backend.wipe_log()
        return self.blobs.sweep() if isinstance(self.blobs, BucketOwner) else 0

    def recover_copies(self) -> list[str]:
        """Remove this machine's copies that have no row any more, as `recover` does.

        Without a bucket an API server recovers the directory.
        """
        if self.copies is None:
            return []
        self._check_still()
        return recovery.recover_copies(self.files, self.database)

    def bucket_counts(self) -> dict[str, int]:
        """How many objects were fetched, lost and damaged; empty without a bucket."""
        return {} if self.copies is None else self.copies.counts()

    def verify(self) -> list[str]:
        """Read every file and row, and say what is wrong; changes nothing."""
        with self.database.snapshot() as db:
            found = [
                *schema.problems(db),
                *speakers.problems(db),
                *stored_files.usage_problems(db),
                *owners.problems(db),
            ]
        return sorted([*found, *self._verification.problems()])

    def close(self) -> None:
        """Leave, and close every connection and lock."""
        with suppress(StorageError):
            self.participants.leave()
        self.files.close()
        self.database.close()

    def _read_audio(self, sha: str, parse: Callable[[bytes, str], T]) -> T | None:
        try:
            found = self._reader.read(sha, AUDIO_KIND, lambda blob: parse(blob, sha))
        except SourceCorruptError:
            self.writer.suspect(sha)
            raise
        if found is None:
            self.writer.suspect(sha)
        return found

    def _read_encoding(
        self,
        read: Callable[[str, str, Callable[[bytes], Encoding]], Encoding | None],
        key: EncodingKey,
    ) -> Encoding | None:
        sha, kind = key.audio_sha256, key.encoder_fingerprint
        try:
            return read(sha, kind, lambda blob: encoding_from_bytes(blob, key))
        except EncodingCorruptError:
            # Left here it would stand for a good one; it is made or fetched again.
            with suppress(StorageError):
                self.files.remove(sha, [kind])
            raise

    def _check_still(self) -> None:
        """See that files and catalogue belong together still. Raises: StorageError."""
        if isinstance(self.blobs, BucketOwner):
            binding.check_still(self.blobs.bucket, self.database)
        elif self.database.backend.has_leases:
            binding.check_still(self.directory, self.database)
