"""Reference audio on disk, by content address."""

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.errors import SourceCorruptError
from vllm_tts_cache.files import publish, storage_errors, sync_directory
from vllm_tts_cache.store import source_file
from vllm_tts_cache.store.audio_layout import StoreLayout
from vllm_tts_cache.store.audio_sweep import SweepEntry, SweepPlan, plan_sweep

# Registered twice: audio may move there while a reader looks at inline.
_LOOKUP_ORDER = (Segment.REGISTERED, Segment.INLINE, Segment.REGISTERED)

# A sweep frees an eighth more than it must, and a process scans again after it has
# added an eighth: so scans are rare, and processes that do not see each other's files
# pass the budget by an eighth each at most.
_SLACK = 8


class AudioStore:
    """One verified file per audio, shared by processes.

    Registered audio stays until it is deleted; inline audio is kept within
    ``inline_max_bytes``, the least recently used dropped first. Audio moves between the
    two segments by rename.

    Every method raises StorageError where the disk fails, and ValueError for an
    ``audio_sha256`` that is not 64 lowercase hex digits.
    """

    def __init__(self, root: Path, inline_max_bytes: int):
        self._layout = StoreLayout(root)
        self._inline_max_bytes = inline_max_bytes
        # Bytes that this process may add to inline before it scans the segment again.
        self._allowance_bytes = 0
        self._lock = threading.Lock()  # over the allowance and over sweeping

    def put(self, audio: ReferenceAudio, segment: Segment) -> Path:
        """Publish the audio and say where it is.

        Nothing is written where the store has it: inline audio becomes registered by a
        rename, and registered audio stays registered whatever is asked for.

        Raises:
            StorageFullError: No space is left; nothing was changed.
        """
        sha256 = audio.audio_sha256
        registered = self._layout.path(sha256, Segment.REGISTERED)
        if _exists(registered):
            return registered
        target = self._layout.path(sha256, segment)
        if segment is Segment.INLINE:
            if not _touch(target):
                publish(target, source_file.to_bytes(audio))
                self._charge_inline(target)
        elif not _move(self._layout.path(sha256, Segment.INLINE), target):
            publish(target, source_file.to_bytes(audio))
        return target

    def get(self, audio_sha256: str) -> ReferenceAudio | None:
        """Read and verify; None if the store does not have it.

        Raises:
            SourceCorruptError: The bytes do not match the address. The file was set
                aside in ``quarantine/``, so the next put heals it.
        """
        for segment in _LOOKUP_ORDER:
            path = self._layout.path(audio_sha256, segment)
            with storage_errors(path):
                try:
                    data = path.read_bytes()
                except FileNotFoundError:
                    continue
            audio = self._parse(data, audio_sha256, path)
            if segment is Segment.INLINE:
                _touch(path)
            return audio
        return None

    def path(self, audio_sha256: str) -> Path | None:
        """Where the audio is, unverified; None if the store does not have it."""
        paths = (self._layout.path(audio_sha256, s) for s in _LOOKUP_ORDER)
        return next((path for path in paths if _exists(path)), None)

    def delete(self, audio_sha256: str) -> bool:
        """Remove the audio, quarantined or not; False if it was not there."""
        paths = [self._layout.path(audio_sha256, s) for s in _LOOKUP_ORDER]
        removed = [_unlink(path) for path in paths]
        removed.append(_unlink(self._layout.quarantine_path(audio_sha256)))
        return any(removed)

    def demote(self, audio_sha256: str) -> None:
        """Make registered audio inline, so that a running request still finds it."""
        registered = self._layout.path(audio_sha256, Segment.REGISTERED)
        inline = self._layout.path(audio_sha256, Segment.INLINE)
        # Touched first: a sweep right after the move must not take it for old.
        if _touch(registered) and _move(registered, inline):
            self._charge_inline(inline)

    def iter_registered(self) -> Iterator[str]:
        """Addresses of all registered audio, in no order."""
        for path in self._layout.iter_files(Segment.REGISTERED):
            if (sha256 := self._layout.audio_sha256(path)) is not None:
                yield sha256

    def plan_inline_sweep(self) -> SweepPlan:
        """What would bring inline audio down to its budget; execute it or not."""
        return plan_sweep(self._inline_entries(), self._inline_max_bytes)

    def remove_partials(self, older_than_seconds: float) -> int:
        """Remove what killed writers left behind; how many files that were."""
        partials = list(self._layout.iter_partials(older_than_seconds))
        return sum(_unlink(path) for path in partials)

    def verify(self, partials_older_than_seconds: float = 0.0) -> list[str]:
        """Read every file and say what is wrong, changing nothing."""
        problems = [
            f"{path}: left behind by a killed writer"
            for path in self._layout.iter_partials(partials_older_than_seconds)
        ]
        for segment in Segment:
            for path in self._layout.iter_files(segment):
                if (problem := self._problem(path)) is not None:
                    problems.append(f"{path}: {problem}")
        return problems

    def _problem(self, path: Path) -> str | None:
        if (sha256 := self._layout.audio_sha256(path)) is None:
            return "is not named like an audio of this store"
        try:
            source_file.from_bytes(path.read_bytes(), sha256)
        except FileNotFoundError:
            return None  # removed or moved since it was listed
        except (SourceCorruptError, OSError) as exc:
            return str(exc)
        return None

    def _parse(self, data: bytes, audio_sha256: str, path: Path) -> ReferenceAudio:
        try:
            return source_file.from_bytes(data, audio_sha256)
        except SourceCorruptError:
            # A disk that cannot even rename must not hide that the bytes are wrong.
            with suppress(OSError):
                aside = self._layout.quarantine_path(audio_sha256)
                aside.parent.mkdir(parents=True, exist_ok=True)
                path.replace(aside)
            raise

    def _charge_inline(self, added: Path) -> None:
        """Count a new inline file, and sweep when the segment may be over budget."""
        with self._lock:
            self._allowance_bytes -= _entry(added).num_bytes
            if self._allowance_bytes >= 0:
                return
            slack = self._inline_max_bytes // _SLACK
            entries = list(self._inline_entries())
            plan = plan_sweep(entries, self._inline_max_bytes, keep=added)
            if plan.drop:
                plan = plan_sweep(entries, self._inline_max_bytes - slack, keep=added)
                plan.execute()
            left = self._inline_max_bytes - plan.kept_bytes
            self._allowance_bytes = max(0, min(left, slack))

    def _inline_entries(self) -> Iterator[SweepEntry]:
        for path in self._layout.iter_files(Segment.INLINE):
            yield _entry(path)


def _entry(path: Path) -> SweepEntry:
    with storage_errors(path), suppress(FileNotFoundError):
        stat = path.lstat()
        return SweepEntry(path, num_bytes=stat.st_size, mtime_ns=stat.st_mtime_ns)
    return SweepEntry(path, num_bytes=0, mtime_ns=0)  # gone, so it costs nothing


def _exists(path: Path) -> bool:
    with storage_errors(path):
        return path.exists()


def _touch(path: Path) -> bool:
    """Mark as used now; False if it is not there."""
    with storage_errors(path), suppress(FileNotFoundError):
        os.utime(path)
        return True
    return False


def _unlink(path: Path) -> bool:
    with storage_errors(path), suppress(FileNotFoundError):
        path.unlink()
        return True
    return False


def _move(source: Path, target: Path) -> bool:
    """Rename into a directory that may not exist yet; False if there is no source."""
    if not _exists(source):
        return False
    with storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            source.replace(target)
        except FileNotFoundError:  # swept or deleted meanwhile
            return False
        sync_directory(target.parent)
    return True
