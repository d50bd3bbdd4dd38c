"""Encodings as verified files, which several processes share."""

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from vllm_tts_cache.encodings import serde
from vllm_tts_cache.encodings.key import EncodingKey, Segment
from vllm_tts_cache.encodings.tiers import disk_check
from vllm_tts_cache.encodings.tiers.base import Budget, TierStats, Traffic
from vllm_tts_cache.encodings.tiers.disk_layout import SUFFIX, DiskLayout
from vllm_tts_cache.encodings.tiers.disk_sweep import (
    Usage,
    plan_sweep,
    remove,
    remove_empty,
    scan,
)
from vllm_tts_cache.encodings.value import Encoding
from vllm_tts_cache.errors import EncodingCorruptError, StorageError
from vllm_tts_cache.files import publish, storage_errors

logger = logging.getLogger(__name__)

# Recency to the minute is enough to choose what to evict, and spares a write per read.
_TOUCH_INTERVAL_SECONDS = 60.0
# Enough to study what a failing disk does, and no place for voices to pile up.
_QUARANTINE = Budget(max_bytes=64 * 1024**2)
# A directory can vanish between its creation and the first file in it, because
# whoever empties one removes it. Several that forget one audio over and over make
# a writer lose about every second attempt.
_NUM_ATTEMPTS = 20
# Whoever moves a file between segments moves it past a single look at each.
_LOOK_ORDER = (Segment.REGISTERED, Segment.INLINE, Segment.REGISTERED)
_EMPTY_ORDER = (Segment.INLINE, Segment.REGISTERED, Segment.INLINE)


class DiskTier:
    """Least-recently-used encodings per segment, content-addressed.

    Every read is verified. Recency is the file's modification time, so processes
    agree on it. Budgets count file sizes; with several processes writing, a
    segment can exceed its budget until one of them scans again.

    Args:
        root: A directory of this tier's own.
        budgets: One per segment.
        clock: Seconds since the epoch.
    """

    name = "disk"

    def __init__(
        self,
        root: Path,
        budgets: Mapping[Segment, Budget],
        *,
        clock: Callable[[], float] = time.time,
    ):
        self._layout = DiskLayout(root)
        self._budgets = {segment: budgets[segment] for segment in Segment}
        self._clock = clock
        self._usage = {segment: Usage() for segment in Segment}
        self._traffic = {segment: Traffic() for segment in Segment}
        self._lock = threading.Lock()  # the two above
        self._sweeping = threading.Lock()

    def path(self, key: EncodingKey, segment: Segment) -> Path:
        """Where the encoding is, or would be."""
        return self._layout.path(key, segment)

    def contains(self, key: EncodingKey) -> bool:
        """Whether a file is there; it is not read.

        Raises:
            StorageError: The directory could not be asked.
        """
        return any(self._has(key, segment) for segment in Segment)

    def get(self, key: EncodingKey, segment: Segment) -> Encoding | None:
        """Read and verify one file; set a corrupt one aside."""
        for holder in _LOOK_ORDER:
            if (encoding := self._read(key, holder)) is not None:
                break
        else:
            self._count(segment, hit=False)
            return None
        self._count(segment, hit=True)
        if segment is Segment.REGISTERED and holder is Segment.INLINE:
            with suppress(StorageError):  # a full disk must not cost a good answer
                self.promote(key)
        return encoding

    def put(self, key: EncodingKey, encoding: Encoding, segment: Segment) -> None:
        """Publish one file and keep its segment within its budget."""
        if self._has(key, Segment.REGISTERED):
            return
        if self._has(key, Segment.INLINE):
            if segment is Segment.REGISTERED:
                self.promote(key)
            return
        blob = serde.encode(key, encoding)
        if not self._budgets[segment].allows(len(blob), 1):
            return
        path = self.path(key, segment)
        _publish(path, blob)
        self._added(segment, len(blob), keep=path)

    def promote(self, key: EncodingKey) -> bool:
        """Rename an inline file into the registered segment, if it fits there."""
        path = self.path(key, Segment.INLINE)
        with storage_errors(path):
            try:
                num_bytes = path.stat().st_size
            except FileNotFoundError:
                return False
        if not self._budgets[Segment.REGISTERED].allows(num_bytes, 1):
            return False
        return self._move(path, key, Segment.INLINE, Segment.REGISTERED)

    def demote(self, audio_sha256: str) -> int:
        """Rename an audio's registered files into the inline segment; count them.

        Raises:
            StorageError: Some may still be registered.
        """
        directory = self._layout.audio_directory(audio_sha256, Segment.REGISTERED)
        num_moved = 0
        for path in _children(directory):
            if (key := self._layout.key_of(path)) is not None:
                num_moved += self._move(path, key, Segment.REGISTERED, Segment.INLINE)
        return num_moved

    def delete(self, key: EncodingKey) -> bool:
        """Remove the file from both segments; False if it was in neither."""
        found = [self._remove(self.path(key, s), s) for s in _EMPTY_ORDER]
        for segment in Segment:
            remove_empty(self.path(key, segment).parent)
        return any(found)

    def forget(self, audio_sha256: str) -> int:
        """Empty the audio's directories, of half-written and corrupt files too."""
        names: set[str] = set()
        for segment in _EMPTY_ORDER:
            directory = self._layout.audio_directory(audio_sha256, segment)
            names |= self._empty(directory, segment)
        self._empty(self._layout.quarantine_directory(audio_sha256), None)
        return len(names)

    def stats(self) -> TierStats:
        """Return what this process knows to be held; scans if it knows too little."""
        for segment in Segment:
            with self._lock:
                is_stale = self._usage[segment].is_stale(self._clock())
            if is_stale:
                self.sweep(segment)
        with self._lock:
            segments = {
                s: self._traffic[s].stats(
                    self._budgets[s],
                    self._usage[s].num_bytes,
                    self._usage[s].num_entries,
                )
                for s in Segment
            }
        return TierStats(self.name, segments)

    def sweep(self, segment: Segment, keep: Path | None = None) -> int:
        """Scan a segment and evict what exceeds its budget; return how many files.

        Raises:
            StorageError: The segment could not be scanned or a file not removed.
        """
        directory = self._layout.segment_directory(segment)
        with self._sweeping, storage_errors(directory):
            files = scan(directory)
            plan = plan_sweep(files, self._budgets[segment], keep)
            num_evicted = plan.execute()
            with self._lock:
                kept = set(files) - set(plan.files)
                self._usage[segment].replace(kept, self._clock())
                self._traffic[segment].evictions += num_evicted
        return num_evicted

    def verify(self, partials_older_than_seconds: float = 3600.0) -> list[str]:
        """Read every file; one line for each corrupt, misnamed or half-written one.

        Raises:
            StorageError: A directory could not be read.
        """
        with storage_errors(self._layout.blobs):
            return disk_check.findings(self._layout, partials_older_than_seconds)

    def remove_partials(self, older_than_seconds: float) -> int:
        """Remove half-written files that killed processes left; return how many.

        Raises:
            StorageError: Some may still be there.
        """
        with storage_errors(self._layout.blobs):
            return disk_check.remove_partials(self._layout, older_than_seconds)

    def _has(self, key: EncodingKey, segment: Segment) -> bool:
        path = self.path(key, segment)
        with storage_errors(path):
            try:
                return stat.S_ISREG(path.stat().st_mode)
            except FileNotFoundError:
                return False

    def _read(self, key: EncodingKey, segment: Segment) -> Encoding | None:
        path = self.path(key, segment)
        with storage_errors(path):
            try:
                with path.open("rb", buffering=0) as file:
                    blob, mtime = file.readall(), os.fstat(file.fileno()).st_mtime
            except FileNotFoundError:
                return None
        try:
            encoding = serde.decode(blob, key)
        except EncodingCorruptError:
            self._set_aside(path, key, segment)
            raise
        if self._clock() - mtime > _TOUCH_INTERVAL_SECONDS:
            self._touch(path)
        return encoding

    def _touch(self, path: Path) -> None:
        now = self._clock()
        with suppress(OSError):  # evicted meanwhile, or a read-only file system
            os.utime(path, (now, now))

    def _set_aside(self, path: Path, key: EncodingKey, segment: Segment) -> None:
        directory = self._layout.quarantine_directory(key.audio_sha256)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            num_bytes = path.stat().st_size
            path.replace(directory / path.name)
            plan_sweep(scan(self._layout.quarantine), _QUARANTINE).execute()
        except FileNotFoundError:
            return  # another reader was first
        except OSError as exc:
            # Left in place it would block every later put of this key.
            logger.warning("Removing corrupt %s, cannot set it aside: %s", path, exc)
            self._remove(path, segment)
        else:
            with self._lock:
                self._usage[segment].subtract(num_bytes)
        remove_empty(path.parent)

    def _move(
        self, path: Path, key: EncodingKey, source: Segment, target: Segment
    ) -> bool:
        destination = self.path(key, target)
        with storage_errors(destination):
            try:
                num_bytes = path.stat().st_size
            except FileNotFoundError:
                return False
            if not _rename(path, destination):
                return False
        self._touch(destination)
        remove_empty(path.parent)
        with self._lock:
            self._usage[source].subtract(num_bytes)
        self._added(target, num_bytes, keep=destination)
        return True

    def _added(self, segment: Segment, num_bytes: int, keep: Path) -> None:
        budget, usage = self._budgets[segment], self._usage[segment]
        with self._lock:
            usage.add(num_bytes)
            is_over = not budget.allows(usage.num_bytes, usage.num_entries)
            is_due = is_over or usage.is_stale(self._clock())
        if is_due:
            # What never fits by itself must not be kept at the others' expense.
            self.sweep(segment, keep if budget.allows(num_bytes, 1) else None)

    def _remove(self, path: Path, segment: Segment | None) -> bool:
        with storage_errors(path):
            num_bytes = remove(path)
        if num_bytes is not None and segment is not None:
            with self._lock:
                self._usage[segment].subtract(num_bytes)
        return num_bytes is not None

    def _empty(self, directory: Path, segment: Segment | None) -> set[str]:
        removed: set[str] = set()
        for _ in range(_NUM_ATTEMPTS):
            for path in _children(directory):
                is_encoding = path.suffix == SUFFIX
                if self._remove(path, segment if is_encoding else None) and is_encoding:
                    removed.add(path.name)
            if remove_empty(directory):
                break
        return removed

    def _count(self, segment: Segment, *, hit: bool) -> None:
        with self._lock:
            if hit:
                self._traffic[segment].hits += 1
            else:
                self._traffic[segment].misses += 1


def _publish(path: Path, blob: bytes) -> None:
    for attempt in range(1, _NUM_ATTEMPTS + 1):
        try:
            publish(path, blob)
        except StorageError as exc:
            vanished = isinstance(exc.__cause__, FileNotFoundError | FileExistsError)
            if not vanished or attempt == _NUM_ATTEMPTS:
                remove_empty(path.parent)
                raise
        else:
            return


def _rename(source: Path, target: Path) -> bool:
    """Rename into a directory that may vanish meanwhile; False if the source did."""
    for attempt in range(1, _NUM_ATTEMPTS + 1):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)
        except (FileNotFoundError, FileExistsError):
            if not source.exists():
                remove_empty(target.parent)
                return False
            if attempt == _NUM_ATTEMPTS:
                raise
        else:
            return True
    return False


def _children(directory: Path) -> list[Path]:
    with storage_errors(directory):
        try:
            return sorted(directory.iterdir())
        except FileNotFoundError:
            return []
