"""Storing bytes, each in the transaction that writes its row.

Each segment is kept within its bytes: which files go is a query.
"""

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.catalogue import owners, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.records import AUDIO_KIND, Segment
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import (
    AudioBudgetError,
    ObjectStoreError,
    StorageBusyError,
    StorageError,
)
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.store import audio_file
from vllm_tts_cache.store.blobs import BlobOwner
from vllm_tts_cache.store.directory import Staged, TakenAwayError
from vllm_tts_cache.store.encoding import Encoding, EncodingKey, encoding_to_bytes
from vllm_tts_cache.store.memory import Counters
from vllm_tts_cache.store.reading import BlobReader

# Files that one transaction removes; others wait for it as long.
_SLICE = 64

T = TypeVar("T")

# Of one clip that others register and delete at the same time.
_MAX_ATTEMPTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskBudgets:
    """The bytes that files may have.

    Attributes:
        audio: Of registered audio, of which one more is refused, and of inline audio,
            of which the least recently used goes.
        encodings: Of each segment's; the least recently used go.
    """

    audio: Mapping[Segment, int]
    encodings: Mapping[Segment, int]


def disk_budgets(settings: Settings) -> DiskBudgets:
    """The budgets of these settings."""
    inline_bytes = int(settings.disk_max_bytes * settings.inline_share)
    return DiskBudgets(
        audio={
            Segment.REGISTERED: settings.audio_max_bytes,
            Segment.INLINE: settings.inline_audio_max_bytes,
        },
        encodings={
            Segment.REGISTERED: settings.disk_max_bytes - inline_bytes,
            Segment.INLINE: inline_bytes,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose a registered audio becomes.

    Attributes:
        max_audio_bytes: What all audio of the tenant may have; None for no limit.
    """

    tenant: str
    max_audio_bytes: int | None = None


class Writer:
    """Writes audio and encodings; see `SpeakerStore`, which it is a part of."""

    def __init__(
        self,
        blobs: BlobOwner,
        reader: BlobReader,
        database: Database,
        budgets: DiskBudgets,
    ):
        self._blobs = blobs
        self._reader = reader
        self._database = database
        self.budgets = budgets
        self.evictions = Counters()  # by segment
        self._log = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

    def is_kept(self, audio_sha256: str, *, is_read: bool = False) -> bool:
        """Whether the audio has a row and its bytes, so far as one look tells.

        Args:
            audio_sha256: The address.
            is_read: Whether to read and verify them. They are read as well where the
                last read found them missing or damaged.

        Raises: StorageError.
        """
        with self._database.read() as db:
            file = stored_files.find(db, audio_sha256, AUDIO_KIND)
        if file is None:
            return False
        try:
            is_whole = self._reader.has(file, is_read=is_read or file.is_suspect)
        except ObjectStoreError:
            return not file.is_suspect
        if is_whole == file.is_suspect:
            self.suspect(audio_sha256, not is_whole)
        return is_whole

    def suspect(self, audio_sha256: str, is_suspect: bool = True) -> None:
        """Note whether a read found an audio missing or damaged; raises nothing.

        Registered audio keeps its row and its bytes. Inline audio goes: the next
        request brings it again.
        """
        with suppress(StorageError), self._database.write() as db:
            file = stored_files.find(db, audio_sha256, AUDIO_KIND)
            if file is not None and is_suspect and file.segment is Segment.INLINE:
                self._blobs.remove(db, audio_sha256, [AUDIO_KIND])
                stored_files.remove(db, audio_sha256, [AUDIO_KIND])
            else:
                stored_files.suspect(db, audio_sha256, is_suspect)

    def restore(self, file: StoredFile, data: bytes) -> bool:
        """Store a file's bytes again; False if its row is another one by now.

        Raises: StorageError.
        """
        staged = self._blobs.stage(data, file.audio_sha256, file.kind)
        try:
            with self._placing(file.audio_sha256, file.kind) as db:
                now = stored_files.find(db, file.audio_sha256, file.kind)
                if is_same := now is not None and now.object_name == file.object_name:
                    self._place(db, staged, file.segment)
                return is_same
        except TakenAwayError:
            return False
        finally:
            self._blobs.unstage(staged)

    def remove(self, file: StoredFile) -> None:
        """Remove a file and its row, unless the row is another one by now.

        Raises: StorageError.
        """
        with self._database.write() as db:
            if stored_files.find(db, file.audio_sha256, file.kind) == file:
                self._blobs.remove(db, file.audio_sha256, [file.kind])
                stored_files.remove(db, file.audio_sha256, [file.kind])

    def keep(
        self,
        audio: DecodedAudio,
        segment: Segment,
        commit: Callable[[Connection], T],
        *,
        owner: Owner | None = None,
        is_bounded: bool = True,
        attempts: int = _MAX_ATTEMPTS,
    ) -> T:
        """Have the audio stored, and what else is to be committed with it.

        Args:
            audio: Written only if it is not stored whole.
            segment: Registered audio stays what it is, inline audio becomes
                registered.
            commit: Called in the transaction; what it raises undoes everything.
            owner: Who has one more voice or recording of it, if it is registered.
            is_bounded: Whether one more registered audio may be too much.
            attempts: How often it may be deleted meanwhile.

        Raises:
            AudioBudgetError: It would be too much.
            StorageError: Nothing was changed.
        """
        sha = audio.audio.audio_sha256
        staged: Staged | None = None
        # Once it has gone, what is committed here may be what takes it away.
        is_read = segment is Segment.REGISTERED
        if attempts < _MAX_ATTEMPTS or not self.is_kept(sha, is_read=is_read):
            data = audio_file.to_bytes(audio)
            staged = self._blobs.stage(data, sha, AUDIO_KIND)
        try:
            with self._placing(sha, AUDIO_KIND) as db:
                result = commit(db)
                num_bytes = self._num_bytes_of(db, sha, staged)
                if is_bounded and segment is Segment.REGISTERED:
                    self._check_budget(db, sha, num_bytes)
                if owner is not None:
                    _own(db, owner, sha, num_bytes)
                self._keep(db, sha, segment, staged)
        except (_GoneError, TakenAwayError):  # deleted or evicted since we looked
            if attempts <= 1:
                raise StorageBusyError(1) from None
            return self.keep(
                audio,
                segment,
                commit,
                owner=owner,
                is_bounded=is_bounded,
                attempts=attempts - 1,
            )
        finally:
            if staged is not None:
                self._blobs.unstage(staged)
        if segment is Segment.INLINE:
            self._make_room(segment, sha, AUDIO_KIND)
        return result

    def publish(self, key: EncodingKey, encoding: Encoding) -> bool:
        """Store an encoding beside its audio; False if that is not stored."""
        for _ in range(_MAX_ATTEMPTS):
            with suppress(TakenAwayError):
                return self._published(key, encoding)
        return False

    def _published(self, key: EncodingKey, encoding: Encoding) -> bool:
        sha, kind = key.audio_sha256, key.encoder_fingerprint
        staged = self._blobs.stage(encoding_to_bytes(key, encoding), sha, kind)
        try:
            with self._placing(sha, kind) as db:
                audio = stored_files.find(db, sha, AUDIO_KIND)
                if audio is None:
                    return False
                self._place(db, staged, audio.segment)
        finally:
            self._blobs.unstage(staged)
        self._make_room(audio.segment, sha, kind)
        return True

    def excess(self) -> dict[tuple[Segment, bool], int]:
        """Bytes that are over their budget, of a segment's audio (True) or encodings.

        Registered audio is not among them: it is never evicted, one more is refused.
        """
        limits = {(segment, False): n for segment, n in self.budgets.encodings.items()}
        limits[Segment.INLINE, True] = self.budgets.audio[Segment.INLINE]
        with self._database.read() as db:
            over = {
                key: stored_files.used(db, key[0], is_audio=key[1]).num_bytes - limit
                for key, limit in limits.items()
            }
        return {key: num_bytes for key, num_bytes in over.items() if num_bytes > 0}

    def trim(self) -> int:
        """Remove what is over its budget; returns how many files that were.

        Raises: StorageError: Some were not removed.
        """
        # No file has just been stored that would have to stay.
        return sum(
            self._evict(segment, "", AUDIO_KIND if is_audio else "")
            for segment, is_audio in self.excess()
        )

    @contextmanager
    def _placing(self, sha: str, kind: str) -> Generator[Connection, None, None]:
        """A write transaction; what was placed in it goes again if it fails."""
        began = False
        try:
            with self._database.write() as db:
                began = True
                yield db
        except StorageError:
            if began:
                with suppress(StorageError), self._database.write() as db:
                    if stored_files.find(db, sha, kind) is None:
                        self._blobs.remove(db, sha, [kind])
            raise

    def _num_bytes_of(self, db: Connection, sha: str, staged: Staged | None) -> int:
        known = stored_files.find(db, sha, AUDIO_KIND)
        if known is not None and self._reader.has(known):
            return known.num_bytes
        if staged is None:
            raise _GoneError
        return len(staged.data)

    def _check_budget(self, db: Connection, sha: str, num_bytes: int) -> None:
        known = stored_files.find(db, sha, AUDIO_KIND)
        if known is not None and known.segment is Segment.REGISTERED:
            return
        max_bytes = self.budgets.audio[Segment.REGISTERED]
        used = stored_files.used(db, Segment.REGISTERED, is_audio=True)
        if used.num_bytes + num_bytes > max_bytes:
            raise AudioBudgetError(max_bytes)

    def _keep(
        self,
        db: Connection,
        sha: str,
        segment: Segment,
        staged: Staged | None,
    ) -> None:
        known = stored_files.find(db, sha, AUDIO_KIND)
        if known is None or not self._reader.has(known):
            if staged is None:
                raise _GoneError
            kept = segment if known is None else known.segment
            self._place(db, staged, kept)
        if segment is Segment.REGISTERED:
            stored_files.move(db, sha, segment)

    def _place(self, db: Connection, staged: Staged, segment: Segment) -> None:
        file = StoredFile(
            audio_sha256=staged.audio_sha256,
            kind=staged.kind,
            segment=segment,
            num_bytes=len(staged.data),
            object_name=self._blobs.place(db, staged),
        )
        stored_files.put(db, file)

    def _make_room(self, segment: Segment, sha: str, kind: str) -> None:
        """Evict after the fact; what was stored stays stored if that fails."""
        try:
            self.evictions.add(segment.value, self._evict(segment, sha, kind))
        except StorageError as exc:
            cause = "more is stored than may be"
            self._log.warn_of(cause, "Cannot remove what is over its budget: %s", exc)

    def _evict(self, segment: Segment, sha: str, kind: str) -> int:
        """Remove a segment's least recently used files that are too much.

        The file that was just stored stays, even where it alone is larger. Its kind
        says whether audio is evicted, or encodings.

        Raises: StorageError: Some were not removed.
        """
        is_audio = kind == AUDIO_KIND
        sizes = self.budgets.audio if is_audio else self.budgets.encodings
        with self._database.read() as db:
            used = stored_files.used(db, segment, is_audio=is_audio)
        num_evicted = 0
        if used.num_bytes > sizes[segment]:
            while some := self._evict_slice(segment, sizes[segment], sha, kind):
                num_evicted += some
        return num_evicted

    def _evict_slice(
        self, segment: Segment, max_bytes: int, sha: str, kind: str
    ) -> int:
        is_audio = kind == AUDIO_KIND
        num_evicted = 0
        with self._database.write() as db:
            used = stored_files.used(db, segment, is_audio=is_audio)
            excess = used.num_bytes - max_bytes
            limit = _SLICE + 1
            for file in stored_files.oldest(
                db, segment, is_audio=is_audio, limit=limit
            ):
                if excess <= 0:
                    break
                if (file.audio_sha256, file.kind) == (sha, kind):
                    continue
                # The file first: a row without one is a miss, a file without a row
                # would stay until somebody looks for it.
                self._blobs.remove(db, file.audio_sha256, [file.kind])
                stored_files.remove(db, file.audio_sha256, [file.kind])
                excess -= file.num_bytes
                num_evicted += 1
        return num_evicted


def _own(db: Connection, owner: Owner, sha: str, num_bytes: int) -> None:
    """Count it as the tenant's; undoes the transaction if that is too much.

    Raises: AudioBudgetError.
    """
    owners.own(db, owner.tenant, sha, num_bytes)
    limit = owner.max_audio_bytes
    if limit is None:
        return
    if owners.of_tenant(db, owner.tenant).audio_bytes > limit:
        raise AudioBudgetError(limit, is_tenants=True)


class _GoneError(Exception):
    """The audio that was stored a moment ago is not any more."""
