"""Moving files to their names, each in the transaction that writes its row."""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.catalogue import stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.record import AUDIO_KIND, Segment
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import AudioBudgetError, StorageError
from vllm_tts_cache.store import audio_file, serde
from vllm_tts_cache.store.directory import StoreDirectory
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.eviction import DiskBudgets, evict
from vllm_tts_cache.throttled_log import ThrottledLog

T = TypeVar("T")


class Writer:
    """Writes audio and encodings; see `SpeakerStore`, which it is a part of."""

    def __init__(
        self, directory: StoreDirectory, database: Database, budgets: DiskBudgets
    ):
        self._files = directory
        self._database = database
        self._budgets = budgets
        self._log = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

    def is_kept(self, audio_sha256: str) -> bool:
        """Whether the audio has a row and a file.

        Raises: StorageError.
        """
        with self._database.read() as db:
            known = stored_files.find(db, audio_sha256, AUDIO_KIND)
        return known is not None and self._files.exists(audio_sha256, AUDIO_KIND)

    def keep(
        self,
        audio: DecodedAudio,
        segment: Segment,
        commit: Callable[[Connection], T],
        *,
        is_bounded: bool = True,
    ) -> T:
        """Have the audio stored, and what else is to be committed with it.

        Args:
            audio: Written only if it is not stored.
            segment: Registered audio stays what it is, inline audio becomes
                registered.
            commit: Called in the transaction; what it raises undoes everything.
            is_bounded: Whether one more registered audio may be too much.

        Raises:
            AudioBudgetError: It would be too much.
            StorageError: Nothing was changed.
        """
        sha = audio.audio.audio_sha256
        staged: Path | None = None
        if not self.is_kept(sha):
            staged = self._files.stage(audio_file.to_bytes(audio))
        try:
            with self._placing(sha, AUDIO_KIND) as db:
                result = commit(db)
                num_bytes = self._num_bytes_of(db, sha, staged)
                if is_bounded and segment is Segment.REGISTERED:
                    self._check_budget(db, sha, num_bytes)
                self._keep(db, sha, segment, staged, num_bytes)
        except _GoneError:  # deleted or evicted since we looked
            return self.keep(audio, segment, commit, is_bounded=is_bounded)
        finally:
            _unstage(staged)
        if segment is Segment.INLINE:
            self._evict(segment, sha, AUDIO_KIND)
        return result

    def publish(self, key: EncodingKey, encoding: Encoding) -> bool:
        """Store an encoding beside its audio; False if that is not stored."""
        sha, kind = key.audio_sha256, key.encoder_fingerprint
        blob = serde.encode(key, encoding)
        staged = self._files.stage(blob)
        try:
            with self._placing(sha, kind) as db:
                audio = stored_files.find(db, sha, AUDIO_KIND)
                if audio is None:
                    return False
                self._place(db, staged, sha, kind, audio.segment, len(blob))
        finally:
            _unstage(staged)
        self._evict(audio.segment, sha, kind)
        return True

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
                        self._files.remove(sha, [kind])
            raise

    def _num_bytes_of(self, db: Connection, sha: str, staged: Path | None) -> int:
        known = stored_files.find(db, sha, AUDIO_KIND)
        if known is not None and self._files.exists(sha, AUDIO_KIND):
            return known.num_bytes
        if staged is None:
            raise _GoneError
        return staged.stat().st_size

    def _check_budget(self, db: Connection, sha: str, num_bytes: int) -> None:
        known = stored_files.find(db, sha, AUDIO_KIND)
        if known is not None and known.segment is Segment.REGISTERED:
            return
        max_bytes = self._budgets.audio[Segment.REGISTERED]
        used = stored_files.used(db, Segment.REGISTERED, is_audio=True)
        if used.num_bytes + num_bytes > max_bytes:
            raise AudioBudgetError(max_bytes)

    def _keep(
        self,
        db: Connection,
        sha: str,
        segment: Segment,
        staged: Path | None,
        num_bytes: int,
    ) -> None:
        known = stored_files.find(db, sha, AUDIO_KIND)
        if known is None or not self._files.exists(sha, AUDIO_KIND):
            if staged is None:
                raise _GoneError
            kept = segment if known is None else known.segment
            self._place(db, staged, sha, AUDIO_KIND, kept, num_bytes)
        if segment is Segment.REGISTERED:
            stored_files.move(db, sha, segment)

    def _place(
        self,
        db: Connection,
        staged: Path,
        sha: str,
        kind: str,
        segment: Segment,
        num_bytes: int,
    ) -> None:
        self._files.place(staged, sha, kind)
        file = StoredFile(
            audio_sha256=sha, kind=kind, segment=segment, num_bytes=num_bytes
        )
        stored_files.put(db, file)

    def _evict(self, segment: Segment, sha: str, kind: str) -> None:
        """Make room after the fact; what was stored stays stored if that fails."""
        sizes = self._budgets.audio if kind == AUDIO_KIND else self._budgets.encodings
        limit, new = sizes[segment], (sha, kind)
        try:
            evict(self._database, self._files, segment, max_bytes=limit, keep=new)
        except StorageError as exc:
            cause = "more is stored than may be"
            self._log.warn_of(cause, "Cannot remove what is over its budget: %s", exc)


def _unstage(staged: Path | None) -> None:
    # Whatever became of it was decided before; what stays is swept with the process.
    if staged is not None:
        with suppress(OSError):
            staged.unlink(missing_ok=True)


class _GoneError(Exception):
    """The audio that was stored a moment ago is not any more."""
