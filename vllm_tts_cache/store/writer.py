"""Stores audio and encodings, each in the transaction that writes its row.

Each segment is kept within its budget in bytes; a query chooses the files to evict.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

from sqlalchemy import Connection

from vllm_tts_cache import errors
from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import AUDIO, Segment
from vllm_tts_cache.catalogue import owners, stored_files
from vllm_tts_cache.catalogue.database import Database, with_ballast
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.config import Settings
from vllm_tts_cache.logs import Counters, ThrottledLog
from vllm_tts_cache.store.blobs import BlobOwner
from vllm_tts_cache.store.directory import Staged, TakenAwayError
from vllm_tts_cache.store.encoding import (
    Encoding,
    EncodingKey,
    audio_to_bytes,
    encoding_to_bytes,
)
from vllm_tts_cache.store.reading import BlobReader
from vllm_tts_cache.tenants import Tenant

# Files that one transaction evicts at most: other writers wait for it.
_SLICE = 64

T = TypeVar("T")

# Attempts to store a clip that other processes register and delete meanwhile.
_MAX_ATTEMPTS = 20


Budgets = Mapping[tuple[Segment, bool], int]
_Where = tuple[str, str]  # address and artifact


def disk_budgets(settings: Settings) -> Budgets:
    """Return the budgets in bytes, by segment and whether for audio or encodings.

    Registered audio beyond its budget is refused; all else is evicted, LRU first.
    """
    inline_bytes = int(settings.disk_max_bytes * settings.inline_share)
    return {
        (Segment.REGISTERED, True): settings.audio_max_bytes,
        (Segment.INLINE, True): settings.inline_audio_max_bytes,
        (Segment.REGISTERED, False): settings.disk_max_bytes - inline_bytes,
        (Segment.INLINE, False): inline_bytes,
    }


class Writer:
    """Writes audio and encodings; a part of `SpeakerStore`."""

    def __init__(
        self, blobs: BlobOwner, reader: BlobReader, database: Database, budgets: Budgets
    ):
        self._blobs = blobs
        self._reader = reader
        self.database = database
        self.budgets = budgets
        self.evictions = Counters()  # by segment
        self._log = ThrottledLog()

    def is_kept(self, audio_sha256: str, *, is_read: bool = False) -> bool:
        """Whether the audio has a row and bytes, without reading the bytes.

        With ``is_read``, or if the last read found them missing or damaged, the bytes
        are read and verified. Raises: StorageError.
        """
        with self.database.read() as db:
            file = stored_files.find(db, audio_sha256, AUDIO)
        if file is None:
            return False
        try:
            is_whole = self._reader.has(file, is_read=is_read or file.is_suspect)
        except errors.ObjectStoreError:
            return not file.is_suspect
        if is_whole == file.is_suspect:
            self.suspect(audio_sha256, not is_whole)
        return is_whole

    def read_audio(
        self, parse: Callable[[bytes, EncodingKey], T], audio_sha256: str
    ) -> T | None:
        """Return ``parse`` of an audio's bytes; None if it is not stored.

        Registered bytes that are damaged stay until the clip is registered again,
        inline ones are removed.

        Raises: SourceCorruptError: The bytes are no audio of this address.
        """
        key = EncodingKey(audio_sha256=audio_sha256, encoder_fingerprint=AUDIO)
        try:
            found = self._reader.read(key, parse)
        except errors.SourceCorruptError:
            self.suspect(audio_sha256)
            raise
        if found is None:
            self.suspect(audio_sha256)
        return found

    def suspect(self, audio_sha256: str, is_suspect: bool = True) -> None:
        """Record whether a read found an audio missing or damaged; raises nothing.

        Registered audio keeps its row and its bytes. Suspect inline audio is removed:
        the next request brings it again.
        """
        with suppress(errors.StorageError):
            with self.database.read() as db:
                file = stored_files.find(db, audio_sha256, AUDIO)
            if file is None:  # no need to wait for the write lock
                return
            with self.database.write() as db:
                file = stored_files.find(db, audio_sha256, AUDIO)
                if file is not None and is_suspect and file.segment is Segment.INLINE:
                    self._remove(db, audio_sha256, AUDIO)
                else:
                    stored_files.suspect(db, audio_sha256, is_suspect)

    def restore(self, file: StoredFile, data: bytes) -> bool:
        """Store a file's bytes again; False if its row was deleted or replaced.

        Raises: StorageError.
        """
        where = file.audio_sha256, file.artifact
        try:
            with self._placing({where: data}) as (db, staged):
                now = stored_files.find(db, *where)
                if is_same := now is not None and now.object_name == file.object_name:
                    self._place(db, staged[where], file.segment, now)
                return is_same
        except TakenAwayError:
            return False

    def remove(self, file: StoredFile) -> None:
        """Remove a file and its row, unless the row has changed.

        Raises: StorageError.
        """
        with self.database.write() as db:
            if stored_files.find(db, file.audio_sha256, file.artifact) == file:
                self._remove(db, file.audio_sha256, file.artifact)

    def store_audio(
        self,
        audio: DecodedAudio | None,
        segment: Segment,
        commit: Callable[[Connection], T],
        *,
        recording: DecodedAudio | None = None,
        encodings: Mapping[str, bytes] = {},
        owner: Tenant | None = None,
        is_bounded: bool = True,
    ) -> T:
        """Store the audio and call ``commit`` in one transaction; return its result.

        Args:
            audio: Written only if it is not stored whole; None for an embedding.
            segment: What the audio counts as; one that is registered stays so, an
                inline one can become registered.
            commit: Called in the transaction; an error that it raises undoes all.
            recording: Stored as the audio is: a consent that comes with a voice.
            encodings: Stored forms of encodings of the audio, by fingerprint; one that
                is stored already stays.
            owner: Gets one more voice or recording of the audio; None for inline audio.
            is_bounded: Whether the budget of registered audio applies.

        Raises:
            AudioBudgetError: The audio would exceed a budget.
            StorageError: Nothing was changed.
        """
        audios = [each for each in (audio, recording) if each is not None]
        shas = [each.audio.audio_sha256 for each in audios]
        if not audios:
            with self.database.write() as db:
                return commit(db)
        # Asked once: ``commit`` itself may delete the rows, which a rollback restores.
        is_read = segment is Segment.REGISTERED
        kept = {sha for sha in shas if self.is_kept(sha, is_read=is_read)}
        wanted = dict(zip(shas, audios, strict=True))
        for _ in range(_MAX_ATTEMPTS):
            files = {(shas[0], artifact): blob for artifact, blob in encodings.items()}
            for sha in wanted.keys() - kept:
                files[sha, AUDIO] = audio_to_bytes(wanted[sha])
            try:
                with self._placing(files) as (db, staged):
                    result = commit(db)
                    for sha in shas:
                        its = staged.get((sha, AUDIO))
                        self._keep(db, sha, segment, its, owner, is_bounded=is_bounded)
                    for artifact in encodings:
                        if stored_files.find(db, shas[0], artifact) is None:
                            self._place(db, staged[shas[0], artifact], segment, None)
                break
            except TakenAwayError:  # deleted or evicted since `is_kept`
                kept.clear()
        else:
            raise errors.StorageBusyError(1)
        for artifact in [AUDIO] if segment is Segment.INLINE else encodings:
            self._make_room(segment, shas[0], artifact)
        return result

    def publish(self, key: EncodingKey, encoding: Encoding) -> bool:
        """Store an encoding, in the place of the one that is stored.

        False if its audio is not stored any more: then the encoding is not either.

        Raises: StorageFullError: No space is left; nothing was changed.
        """
        sha, artifact = where = key.audio_sha256, key.encoder_fingerprint
        for _ in range(_MAX_ATTEMPTS):
            files = {where: encoding_to_bytes(key, encoding)}
            try:
                with self._placing(files) as (db, staged):
                    rows = {f.artifact: f for f in stored_files.of_audio(db, sha)}
                    if (audio := rows.get(AUDIO)) is None:
                        return False
                    replaced = rows.get(artifact)
                    num_bytes = self._place(db, staged[where], audio.segment, replaced)
            except TakenAwayError:
                continue
            if num_bytes > self.budgets[audio.segment, False]:
                self._make_room(audio.segment, sha, artifact)
            return True
        return False

    def excess(self) -> dict[tuple[Segment, bool], int]:
        """Return the bytes over each budget, for a segment's audio (True) or encodings.

        Registered audio is not included: it is never evicted, a new one is refused.
        """
        over: dict[tuple[Segment, bool], int] = {}
        with self.database.read() as db:
            for (segment, is_audio), limit in self.budgets.items():
                used = stored_files.used(db, segment, is_audio=is_audio).num_bytes
                if used > limit and (segment, is_audio) != (Segment.REGISTERED, True):
                    over[segment, is_audio] = used - limit
        return over

    def trim(self) -> int:
        """Evict what is over its budget; return how many files.

        Raises: StorageError: Some files were not removed.
        """
        # An empty address: there is no new file that would have to stay.
        return sum(
            self._evict(segment, "", AUDIO if is_audio else "")
            for segment, is_audio in self.excess()
        )

    @contextmanager
    def _placing(
        self, files: Mapping[_Where, bytes]
    ) -> Generator[tuple[Connection, dict[_Where, Staged]], None, None]:
        """Stage files for a write transaction; if it fails, none of them is placed."""
        staged: dict[_Where, Staged] = {}
        began = False
        try:
            for where, data in files.items():
                staged[where] = self._blobs.stage(data, *where)
            with self.database.write() as db:
                began = True
                yield db, staged
        except Exception:  # a budget's as well: another file may be placed already
            if began and staged:
                with suppress(errors.StorageError), self.database.write() as db:
                    for sha, artifact in staged:
                        if stored_files.find(db, sha, artifact) is None:
                            self._blobs.remove(db, sha, [artifact])
            raise
        finally:
            for each in staged.values():
                self._blobs.unstage(each)

    def _keep(
        self,
        db: Connection,
        sha: str,
        segment: Segment,
        staged: Staged | None,
        owner: Tenant | None,
        *,
        is_bounded: bool,
    ) -> None:
        """Store the audio in the transaction, and count it as the owner's.

        Raises:
            AudioBudgetError: The audio would exceed a budget.
            TakenAwayError: The audio is not stored any more, and was not staged.
        """
        known = stored_files.find(db, sha, AUDIO)
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
                raise errors.AudioBudgetError(max_bytes)
        if owner is not None:
            owners.own(db, owner.name, sha, num_bytes)
            limit, usage_of = owner.limits.max_audio_bytes, owners.of_tenant
            if limit is not None and usage_of(db, owner.name).audio_bytes > limit:
                raise errors.AudioBudgetError(limit, is_tenants=True)
        if staged is not None:
            kept_as = Segment.REGISTERED if is_registered else segment
            self._place(db, staged, kept_as, known)
        if segment is Segment.REGISTERED and not is_registered:
            # Its encodings as well, which an evicted inline audio leaves.
            stored_files.move(db, sha, segment)

    def _place(
        self,
        db: Connection,
        staged: Staged,
        segment: Segment,
        replaced: StoredFile | None,
    ) -> int:
        """Place bytes and write their row; return the bytes of the segment with it."""
        file = StoredFile(
            audio_sha256=staged.audio_sha256,
            artifact=staged.artifact,
            segment=segment,
            num_bytes=len(staged.data),
            object_name=staged.object_name,
        )
        self._blobs.place(staged, db)
        return stored_files.put(db, file, replaced)

    def _make_room(self, segment: Segment, sha: str, artifact: str) -> None:
        """Evict what is over the budget; if that fails, the new file stays stored."""
        try:
            self.evictions.add(segment.value, self._evict(segment, sha, artifact))
        except errors.StorageError as exc:
            message = "Evicting files of a segment over its budget failed: %s"
            self._log.warn_of("evicting", message, exc)

    def _evict(self, segment: Segment, sha: str, artifact: str) -> int:
        """Evict a segment's least recently used files until it is within its budget.

        The new file, ``sha`` and ``artifact``, stays even if it alone is larger. The
        artifact says whether audio or encodings are evicted.

        Raises: StorageError: Some files were not removed.
        """
        is_audio = artifact == AUDIO
        max_bytes = self.budgets[segment, is_audio]
        with self.database.read() as db:
            used = stored_files.used(db, segment, is_audio=is_audio).num_bytes
        num_evicted = 0
        if used > max_bytes:
            while some := self._evict_slice(segment, max_bytes, sha, artifact):
                num_evicted += some
        return num_evicted

    @with_ballast
    def _evict_slice(
        self, segment: Segment, max_bytes: int, sha: str, artifact: str
    ) -> int:
        is_audio = artifact == AUDIO
        num_evicted = 0
        with self.database.write() as db:
            used = stored_files.used(db, segment, is_audio=is_audio).num_bytes
            excess = used - max_bytes
            for file in stored_files.oldest(db, segment, is_audio, limit=_SLICE + 1):
                if excess <= 0:
                    break
                if (file.audio_sha256, file.artifact) == (sha, artifact):
                    continue
                self._remove(db, file.audio_sha256, file.artifact)
                excess -= file.num_bytes
                num_evicted += 1
        return num_evicted

    def _remove(self, db: Connection, sha: str, artifact: str) -> None:
        # The file first: a row without one is a miss, a file without a row would stay
        # until a recovery finds it.
        self._blobs.remove(db, sha, [artifact])
        stored_files.remove(db, sha, [artifact])
