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


Budgets = Mapping[tuple[Segment, bool], int]


def disk_budgets(settings: Settings) -> Budgets:
    """The bytes that files may have: of a segment's audio (True), and its encodings.

    Of registered audio one more is refused; of all else the least recently used goes.
    """
    inline_bytes = int(settings.disk_max_bytes * settings.inline_share)
    return {
        (Segment.REGISTERED, True): settings.audio_max_bytes,
        (Segment.INLINE, True): settings.inline_audio_max_bytes,
        (Segment.REGISTERED, False): settings.disk_max_bytes - inline_bytes,
        (Segment.INLINE, False): inline_bytes,
    }


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
        self, blobs: BlobOwner, reader: BlobReader, database: Database, budgets: Budgets
    ):
        self._blobs = blobs
        self._reader = reader
        self._database = database
        self.budgets = budgets
        self.evictions = Counters()  # by segment
        self._log = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

    def is_kept(self, audio_sha256: str, *, is_read: bool = False) -> bool:
        """Whether the audio has a row and its bytes, so far as one look tells.

        With ``is_read`` they are read and verified, as they are where the last read
        found them missing or damaged. Raises: StorageError.
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
        with suppress(StorageError):
            with self._database.read() as db:
                file = stored_files.find(db, audio_sha256, AUDIO_KIND)
            if file is None:  # which nobody has to wait for
                return
            with self._database.write() as db:
                file = stored_files.find(db, audio_sha256, AUDIO_KIND)
                if file is not None and is_suspect and file.segment is Segment.INLINE:
                    self._remove(db, audio_sha256, AUDIO_KIND)
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
                self._remove(db, file.audio_sha256, file.kind)

    def keep(
        self,
        audio: DecodedAudio | None,
        segment: Segment,
        commit: Callable[[Connection], T],
        *,
        owner: Owner | None = None,
        is_bounded: bool = True,
    ) -> T:
        """Have the audio stored, and what else is to be committed with it.

        Args:
            audio: Written only if it is not stored whole; None for a voice without.
            segment: Registered audio stays what it is, inline audio becomes
                registered.
            commit: Called in the transaction; what it raises undoes everything.
            owner: Who has one more voice or recording of it, if it is registered.
            is_bounded: Whether one more registered audio may be too much.

        Raises:
            AudioBudgetError: It would be too much.
            StorageError: Nothing was changed.
        """
        if audio is None:
            with self._database.write() as db:
                return commit(db)
        sha = audio.audio.audio_sha256
        # Once it has gone, what is committed here may be what takes it away.
        is_kept = self.is_kept(sha, is_read=segment is Segment.REGISTERED)
        for _ in range(_MAX_ATTEMPTS):
            staged: Staged | None = None
            if not is_kept:
                data = audio_file.to_bytes(audio)
                staged = self._blobs.stage(data, sha, AUDIO_KIND)
            try:
                with self._placing(sha, AUDIO_KIND) as db:
                    result = commit(db)
                    self._keep(db, sha, segment, staged, owner, is_bounded=is_bounded)
                break
            except TakenAwayError:  # deleted or evicted since we looked
                is_kept = False
            finally:
                if staged is not None:
                    self._blobs.unstage(staged)
        else:
            raise StorageBusyError(1)
        if segment is Segment.INLINE:
            self._make_room(segment, sha, AUDIO_KIND)
        return result

    def publish(self, key: EncodingKey, encoding: Encoding) -> bool:
        """Store an encoding beside its audio; False if that is not stored."""
        sha, kind = key.audio_sha256, key.encoder_fingerprint
        for _ in range(_MAX_ATTEMPTS):
            staged = self._blobs.stage(encoding_to_bytes(key, encoding), sha, kind)
            try:
                with self._placing(sha, kind) as db:
                    audio = stored_files.find(db, sha, AUDIO_KIND)
                    if audio is None:
                        return False
                    self._place(db, staged, audio.segment)
            except TakenAwayError:
                continue
            finally:
                self._blobs.unstage(staged)
            self._make_room(audio.segment, sha, kind)
            return True
        return False

    def excess(self) -> dict[tuple[Segment, bool], int]:
        """Bytes that are over their budget, of a segment's audio (True) or encodings.

        Registered audio is not among them: it is never evicted, one more is refused.
        """
        over: dict[tuple[Segment, bool], int] = {}
        with self._database.read() as db:
            for (segment, is_audio), limit in self.budgets.items():
                used = stored_files.used(db, segment, is_audio=is_audio).num_bytes
                if used > limit and (segment, is_audio) != (Segment.REGISTERED, True):
                    over[segment, is_audio] = used - limit
        return over

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

    def _keep(
        self,
        db: Connection,
        sha: str,
        segment: Segment,
        staged: Staged | None,
        owner: Owner | None,
        *,
        is_bounded: bool,
    ) -> None:
        """Store the audio in the transaction, and count it as the owner's.

        Raises:
            AudioBudgetError: It is too much.
            TakenAwayError: It is not there any more, and was not staged.
        """
        known = stored_files.find(db, sha, AUDIO_KIND)
        if known is not None and self._reader.has(known):
            num_bytes, staged = known.num_bytes, None
        elif staged is not None:
            num_bytes = len(staged.data)
        else:
            raise TakenAwayError
        is_registered = known is not None and known.segment is Segment.REGISTERED
        if is_bounded and segment is Segment.REGISTERED and not is_registered:
            used = stored_files.used(db, segment, is_audio=True).num_bytes
            if used + num_bytes > (max_bytes := self.budgets[segment, True]):
                raise AudioBudgetError(max_bytes)
        if owner is not None:
            owners.own(db, owner.tenant, sha, num_bytes)
            limit = owner.max_audio_bytes
            used = owners.of_tenant(db, owner.tenant).audio_bytes
            if limit is not None and used > limit:
                raise AudioBudgetError(limit, is_tenants=True)
        if staged is not None:
            self._place(db, staged, segment if known is None else known.segment)
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
        max_bytes = self.budgets[segment, is_audio]
        with self._database.read() as db:
            used = stored_files.used(db, segment, is_audio=is_audio).num_bytes
        num_evicted = 0
        if used > max_bytes:
            while some := self._evict_slice(segment, max_bytes, sha, kind):
                num_evicted += some
        return num_evicted

    def _evict_slice(
        self, segment: Segment, max_bytes: int, sha: str, kind: str
    ) -> int:
        is_audio = kind == AUDIO_KIND
        num_evicted = 0
        with self._database.write() as db:
            used = stored_files.used(db, segment, is_audio=is_audio).num_bytes
            excess = used - max_bytes
            for file in stored_files.oldest(db, segment, is_audio, limit=_SLICE + 1):
                if excess <= 0:
                    break
                if (file.audio_sha256, file.kind) == (sha, kind):
                    continue
                self._remove(db, file.audio_sha256, file.kind)
                excess -= file.num_bytes
                num_evicted += 1
        return num_evicted

    def _remove(self, db: Connection, sha: str, kind: str) -> None:
        # The file first: a row without one is a miss, a file without a row would stay
        # until somebody looks for it.
        self._blobs.remove(db, sha, [kind])
        stored_files.remove(db, sha, [kind])
