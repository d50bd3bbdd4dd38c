"""`SpeakerStore` owns ``SPEAKER_SAMPLES_DIR``: only its parts write files and rows.

What must hold, whenever a process dies:

* A file is moved to its name and its row is written in one write transaction. A crash
  between the two leaves a file without a row, which `recover` removes.
* A registration commits speaker, file and what it replaced at once. A deletion is
  committed as a row and then carried out; `recover` finishes an interrupted one.
* A file is removed only if the catalogue, in the same transaction, has no owner of it.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

from cachetools import TTLCache
from sqlalchemy import Connection

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import AUDIO, Segment
from vllm_tts_cache.catalogue import (
    deletions,
    owners,
    pages,
    schema,
    speakers,
    stored_files,
)
from vllm_tts_cache.catalogue.database import Database, with_ballast
from vllm_tts_cache.catalogue.deletions import Deletion, DeletionProgress
from vllm_tts_cache.catalogue.names import is_storable
from vllm_tts_cache.catalogue.records import DEFAULT_TENANT, SpeakerRecord
from vllm_tts_cache.catalogue.stored_files import Usage
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import EncodingCorruptError, StorageError
from vllm_tts_cache.files import fill_ballast
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.store import binding, recovery
from vllm_tts_cache.store.binding import StoreId
from vllm_tts_cache.store.blobs import BlobOwner, BucketOwner
from vllm_tts_cache.store.consents import Consents
from vllm_tts_cache.store.encoding import (
    Encoding,
    EncodingKey,
    audio_from_bytes,
    audio_to_client,
    encoding_from_bytes,
)
from vllm_tts_cache.store.participants import (
    LeasedParticipants,
    LockedParticipants,
    Participants,
)
from vllm_tts_cache.store.reading import BlobReader
from vllm_tts_cache.store.recovery import Verification
from vllm_tts_cache.store.registering import Registrations, remove_files
from vllm_tts_cache.store.writer import Writer, disk_budgets

P = ParamSpec("P")
T = TypeVar("T")

throttled = ThrottledLog()

# Recency to the minute is enough to choose what to evict, and spares a write per use.
_TOUCH_INTERVAL_SECONDS = 60.0
_MAX_TOUCHED = 10_000
_FULL_SHARE = 0.9


def _reading(
    look: Callable[Concatenate[Connection, P], T],
) -> Callable[Concatenate["SpeakerStore", P], T]:
    """Return the method that answers a query over the connection that it gets."""

    @wraps(look)
    def read(self: "SpeakerStore", *args: P.args, **kwargs: P.kwargs) -> T:
        with self.database.read() as db:
            return look(db, *args, **kwargs)

    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSpeaker:
    """A registered speaker.

    Attributes:
        fingerprints: The encoders whose encodings of its audio are stored.
    """

    record: SpeakerRecord
    fingerprints: frozenset[str]


class SpeakerStore:
    """Speakers, their audio and its encodings, shared by all processes of a catalogue.

    Every method may be called from any thread and raises StorageError if the disk, the
    bucket or the catalogue fails. A method that returns has committed its changes.

    Args:
        settings: The directory and the budgets.
        database: The catalogue.
        reader: Reads the stored bytes.
        blobs: Stores and removes them.
        store_id: Compared by processes that must use the same store.
        is_local: Whether only this host has the catalogue, so that a lookup takes
            microseconds and may run on an event loop.

    Attributes:
        directory: ``SPEAKER_SAMPLES_DIR``.
        files: The store's files, or this machine's copies of a bucket's objects.
        copies: This machine's copies of a bucket's objects; None without a bucket.
        writer: Stores bytes, and keeps them within their budgets.
        read: Reads and verifies an encoding, from disk or bucket; None if it is not
            stored. Raises EncodingCorruptError if the bytes are wrong.
        read_here: As ``read``, from this machine's disk only. Uses no query and no
            lock: the engine's thread may call it.
        read_audio: Returns the audio of an address, as `Writer.read_audio`.
        audio_for_client: Returns it as a file, and its media type.
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
        self.files, self.blobs = blobs.files, blobs
        self.database = database
        self.directory, self.store_id = blobs.files.root, store_id
        self.is_local = is_local
        self.copies = blobs.copies if isinstance(blobs, BucketOwner) else None
        self.writer = Writer(blobs, reader, database, disk_budgets(settings))
        self.read: Callable[[EncodingKey], Encoding | None] = partial(
            self._read_encoding, reader.read
        )
        self.read_here = partial(self._read_encoding, reader.read_here)
        self.read_audio = partial(self.writer.read_audio, audio_from_bytes)
        self.audio_for_client = partial(self.writer.read_audio, audio_to_client)
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
        # Audio of requests whose use was recorded here less than a minute ago.
        self._touched = TTLCache[str, None](_MAX_TOUCHED, _TOUCH_INTERVAL_SECONDS)
        self._touching = threading.Lock()

    # --- queries; each is documented where it is defined

    unencoded = _reading(speakers.unencoded)
    to_retry = _reading(speakers.to_retry)
    last_generation = _reading(speakers.last_generation)
    set_precompute = _reading(speakers.set_precompute)
    has_expired = _reading(speakers.have_expired)
    expired_names = _reading(speakers.expired_names)
    speaker_embedding = _reading(speakers.embedding)
    failures = _reading(stored_files.failures)
    stored_artifacts = _reading(stored_files.artifacts)
    last_used = _reading(stored_files.last_used_speakers)
    records = _reading(pages.records)
    names = _reading(pages.names)
    num_speakers = _reading(owners.num_voices)
    usage_of = _reading(owners.of_tenant)
    usage_of_tenants = _reading(owners.of_all)
    unfinished_deletions = _reading(deletions.unfinished)
    num_unfinished_deletions = _reading(deletions.num_unfinished)

    # --- the API process

    def find(self, name: str, tenant: str = DEFAULT_TENANT) -> StoredSpeaker | None:
        """Return the speaker of a name or id; None if there is none or it has expired.

        One indexed read; with ``is_local`` it may run on an event loop.

        Raises: StorageBusyError: The catalogue is being opened or recovered.
        """
        if (found := speakers.find_with_artifacts(self.database, tenant, name)) is None:
            return None
        record, artifacts = found
        return StoredSpeaker(record=record, fingerprints=frozenset(artifacts) - {AUDIO})

    def store_inline(self, audio: DecodedAudio) -> None:
        """Store audio that came with a request; if it is stored, only record its use.

        If inline audio exceeds its budget, the least recently used is evicted. A
        failure to record the use is logged and no error.

        Raises: StorageFullError: No space is left; nothing was changed.
        """
        sha = audio.audio.audio_sha256
        if not self.writer.is_kept(sha):
            self.writer.store_audio(audio, Segment.INLINE, lambda _: None)
            return
        with self._touching:
            if sha in self._touched:
                return
            self._touched[sha] = None
        try:
            self.used([sha])
        except StorageError as exc:
            throttled.warn_of("noting", "A use was not recorded: %s", exc.log_text)

    def is_lost(self, record: SpeakerRecord) -> bool:
        """Whether a speaker's reference audio is missing; see `Writer.is_kept`."""
        sha = record.audio_sha256
        return sha is not None and not self.writer.is_kept(sha)

    def has_audio(self, audio_sha256: str) -> bool:
        """Whether the audio has a row, registered or inline; reads an index."""
        with self.database.read() as db:
            return stored_files.find(db, audio_sha256, AUDIO) is not None

    def first_to_precompute(self) -> int:
        """Return the generation from which a server that starts precomputes.

        That is 1, or the next one that is registered if the encodings' budget is full:
        encoding again what was evicted would evict other encodings.
        """
        segment = Segment.REGISTERED
        max_bytes = self.writer.budgets[segment, False]
        with self.database.read() as db:
            used = stored_files.used(db, segment, is_audio=False).num_bytes
            is_full = used > _FULL_SHARE * max_bytes
            return 1 + (speakers.last_generation(db) if is_full else 0)

    def note_failed(self, key: EncodingKey, reason: str) -> None:
        """Note that an encode failed, until it succeeds or the audio is deleted."""
        with self.database.write() as db:
            sha, fingerprint = key.audio_sha256, key.encoder_fingerprint
            stored_files.fail(db, sha, fingerprint, reason)

    @with_ballast
    def remove_files(self, deletion: Deletion) -> None:
        """Remove a deletion's files; see `registering.remove_files`."""
        remove_files(self.blobs, self.database, deletion)

    def progress(
        self, name: str, tenant: str = DEFAULT_TENANT
    ) -> DeletionProgress | None:
        """Return how far the deletion of a name or id is.

        None if there is none, or if it was finished and acknowledged. Dead participants
        do not count; this process does while it may have missed deletions.
        """
        if not is_storable(name):
            return None
        with self.database.read() as db:
            found = deletions.of_name(db, tenant, name)
        if found is not None and found.waiting_for:
            self.participants.delete_dead()
            with self.database.read() as db:
                found = deletions.of_name(db, tenant, name)
        if found is not None and not self.participants.has_missed_none():
            return replace(found, waiting_for=max(found.waiting_for, 1))
        return found

    @with_ballast
    def acknowledge(self, deletion_id: int) -> None:
        """Delete a finished deletion's row, once its client is answered."""
        with self.database.write() as db:
            deletions.acknowledge(db, deletion_id)

    # --- what there is

    def usage(self) -> dict[Segment, dict[str, Usage]]:
        """Return each segment's usage: ``audio`` and ``encodings``; reads four rows."""
        with self.database.read() as db:
            return {
                segment: {
                    "audio": stored_files.used(db, segment, is_audio=True),
                    "encodings": stored_files.used(db, segment, is_audio=False),
                }
                for segment in Segment
            }

    # --- workers

    def used(self, audio_sha256s: Iterable[str]) -> None:
        """Record a use, now, of all files of these audios.

        One write transaction: call it seldom and with many, from a thread of its own.
        """
        with self.database.write() as db:
            stored_files.touch(db, audio_sha256s)

    # --- maintenance

    def recover(self) -> list[str]:
        """Finish what killed processes began; return a line for each thing done.

        Walks the whole directory, in slices: call it in a thread of its own. Other
        processes may use the store meanwhile.

        Raises:
            StorageError: A step failed; or the directory is not (any more) that of the
                catalogue, for example not mounted: then nothing was changed.
        """
        self._check_still()
        self.participants.delete_dead()
        return recovery.recover(self.blobs, self.database)

    def repair(self) -> list[str]:
        """Recover, and repair damaged files; return a line for each thing done.

        With a bucket this also removes objects without a row, which restoring an older
        catalogue leaves, and stores damaged audio again from this machine's copies. It
        reads every file.
        """
        lines = self.recover()
        if isinstance(self.blobs, BucketOwner):
            lines += self.blobs.remove_strays()
        return lines + self._verification.repair(self.writer)

    def sweep(self) -> int:
        """Remove released objects of a bucket, and deleted rows from SQLite's log.

        Writes the ballast as well, where it is missing and there is room for it.
        Returns how many objects were removed. Without any it is quick, so that a task
        can call it every few seconds.
        """
        # The process that finished a deletion died before it emptied the log, or could
        # not because another one was reading.
        self.database.backend.wipe_log()
        fill_ballast(self.directory)
        return self.blobs.sweep() if isinstance(self.blobs, BucketOwner) else 0

    def recover_copies(self) -> list[str]:
        """Remove this machine's copies that have no row any more, as `recover` does.

        Without a bucket it does nothing: an API server recovers the directory.
        """
        if self.copies is None:
            return []
        self._check_still()
        return recovery.recover_copies(self.files, self.database)

    def bucket_counts(self) -> dict[str, int]:
        """Return how many objects were fetched, lost, corrupt; {} without a bucket."""
        if self.copies is None:
            return {}
        counted = self.copies.counters.snapshot()
        return {name: counted[name] for name in ("fetched", "lost", "corrupt")}

    def verify(self) -> list[str]:
        """Read every file and row; return a line for each fault, repair none."""
        with self.database.snapshot() as db:
            found = [
                *schema.problems(db),
                *speakers.problems(db),
                *stored_files.usage_problems(db),
                *owners.problems(db),
            ]
        return sorted([*found, *self._verification.problems()])

    def close(self) -> None:
        """Leave the participants, and close every connection and lock."""
        with suppress(StorageError):
            self.participants.leave()
        self.files.close()
        self.database.close()

    def _read_encoding(
        self, read: Callable[..., Encoding | None], key: EncodingKey
    ) -> Encoding | None:
        """Read and verify an encoding; None if it is not stored.

        Raises: EncodingCorruptError: The bytes are wrong.
        """
        try:
            return read(key, encoding_from_bytes)
        except EncodingCorruptError:
            # If it stayed, it would count as stored; it is made or fetched again.
            with suppress(StorageError):
                self.files.remove(key.audio_sha256, [key.encoder_fingerprint])
            raise

    def _check_still(self) -> None:
        """Verify that files and catalogue belong together. Raises: StorageError."""
        if isinstance(self.blobs, BucketOwner):
            binding.check_still(self.blobs.bucket, self.database)
        elif self.database.backend.has_leases:
            binding.check_still(self.directory, self.database)
