"""Encodings as verified files, which several processes share."""

import logging
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from vllm_tts_cache.errors import EncodingCorruptError, StorageError
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.store import serde
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.keys import EncodingKey, Segment
from vllm_tts_cache.store.tiers import disk_check
from vllm_tts_cache.store.tiers.base import Budget, TierStats
from vllm_tts_cache.store.tiers.disk_files import (
    NUM_ATTEMPTS,
    children,
    look,
    publish_retrying,
    read,
    remove,
    remove_empty,
    remove_tree,
    rename_retrying,
    touch,
)
from vllm_tts_cache.store.tiers.disk_layout import SUFFIX, DiskLayout
from vllm_tts_cache.store.tiers.disk_quarantine import set_aside
from vllm_tts_cache.store.tiers.disk_sweep import plan_sweep, scan
from vllm_tts_cache.store.tiers.disk_usage import Ledger

logger = logging.getLogger(__name__)

# Recency to the minute is enough to choose what to evict, and spares a write per use.
_TOUCH_INTERVAL_SECONDS = 60.0
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
        self._ledger = Ledger(self._budgets, clock)
        self._sweeping = threading.Lock()

    def path(self, key: EncodingKey, segment: Segment) -> Path:
        """Where the encoding is, or would be."""
        return Path(self._layout.file_name(key, segment))

    def contains(self, key: EncodingKey) -> bool:
        """Whether a file is there; it is not read, and it counts as used.

        A voice that every worker has in memory is read from disk by nobody, and a
        full disk must not for that give it up first. Whoever serves it looks here.

        Raises:
            StorageError: The directory could not be asked.
        """
        for segment in Segment:
            if (mtime := self._published(key, segment)) is not None:
                self._use(self._layout.file_name(key, segment), mtime)
                return True
        return False

    def get(self, key: EncodingKey, segment: Segment) -> Encoding | None:
        """Read and verify one file; set a corrupt one aside."""
        for holder in _LOOK_ORDER:
            if (encoding := self._read(key, holder)) is not None:
                break
        else:
            self._ledger.count(segment, hit=False)
            return None
        self._ledger.count(segment, hit=True)
        if holder is not segment and holder is Segment.INLINE:
            with suppress(StorageError):  # a full disk must not cost a good answer
                self.promote(key)
        return encoding

    def put(self, key: EncodingKey, encoding: Encoding, segment: Segment) -> None:
        """Publish one file and keep its segment within its budget."""
        if self._published(key, Segment.REGISTERED) is not None:
            return
        if self._published(key, Segment.INLINE) is not None:
            if segment is Segment.REGISTERED:
                self.promote(key)
            return
        blob = serde.encode(key, encoding)
        if not self._budgets[segment].allows(len(blob), 1):
            return
        path = self.path(key, segment)
        publish_retrying(path, blob)
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
        for path in children(directory):
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
        """Empty the audio's directories, of half-written and corrupt files too.

        Files of older formats go as a whole: nobody reads them any more, and this
        audio's may be among them.
        """
        self._drop_older_versions()
        names: set[str] = set()
        for segment in _EMPTY_ORDER:
            directory = self._layout.audio_directory(audio_sha256, segment)
            names |= self._empty(directory, segment)
        self._empty(self._layout.quarantine_directory(audio_sha256), None)
        return len(names)

    def stats(self) -> TierStats:
        """Return what this process knows to be held; scans if it knows too little."""
        for segment in Segment:
            if self._ledger.is_stale(segment):
                self.sweep(segment)
        return TierStats(self.name, self._ledger.stats())

    def sweep(self, segment: Segment, keep: Path | None = None) -> int:
        """Scan a segment and evict what exceeds its budget; return how many files.

        Files of older formats go too, whatever the budget.

        Raises:
            StorageError: The segment could not be scanned or a file not removed.
        """
        directory = self._layout.segment_directory(segment)
        with suppress(StorageError):  # they are in nobody's way but the disk's
            self._drop_older_versions()
        with self._sweeping, storage_errors(directory):
            files = scan(directory)
            plan = plan_sweep(files, self._budgets[segment], keep)
            num_evicted = plan.execute()
            self._ledger.scanned(segment, set(files) - set(plan.files), num_evicted)
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

    def _published(self, key: EncodingKey, segment: Segment) -> float | None:
        """Return the modification time of a regular file; None if there is none."""
        status = look(self._layout.file_name(key, segment))
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        return status.st_mtime

    def _read(self, key: EncodingKey, segment: Segment) -> Encoding | None:
        name = self._layout.file_name(key, segment)
        if (found := read(name)) is None:
            return None
        blob, mtime = found
        try:
            encoding = serde.decode(blob, key)
        except EncodingCorruptError:
            self._set_aside(Path(name), key, segment)
            raise
        self._use(name, mtime)
        return encoding

    def _use(self, name: str, mtime: float) -> None:
        if (now := self._clock()) - mtime > _TOUCH_INTERVAL_SECONDS:
            touch(name, now)

    def _set_aside(self, path: Path, key: EncodingKey, segment: Segment) -> None:
        directory = self._layout.quarantine_directory(key.audio_sha256)
        try:
            num_bytes = set_aside(path, directory, self._layout.quarantine)
        except OSError as exc:
            # Left in place it would block every later put of this key.
            logger.warning("Removing corrupt %s, cannot set it aside: %s", path, exc)
            self._remove(path, segment)
        else:
            if num_bytes is None:
                return
            self._ledger.subtract(segment, num_bytes)
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
            if not rename_retrying(path, destination):
                return False
        touch(destination, self._clock())
        remove_empty(path.parent)
        self._ledger.subtract(source, num_bytes)
        self._added(target, num_bytes, keep=destination)
        return True

    def _added(self, segment: Segment, num_bytes: int, keep: Path) -> None:
        if self._ledger.add(segment, num_bytes):
            # What never fits by itself must not be kept at the others' expense.
            fits = self._budgets[segment].allows(num_bytes, 1)
            self.sweep(segment, keep if fits else None)

    def _remove(self, path: Path, segment: Segment | None) -> bool:
        with storage_errors(path):
            num_bytes = remove(path)
        if num_bytes is not None and segment is not None:
            self._ledger.subtract(segment, num_bytes)
        return num_bytes is not None

    def _empty(self, directory: Path, segment: Segment | None) -> set[str]:
        removed: set[str] = set()
        for _ in range(NUM_ATTEMPTS):
            for path in children(directory):
                is_encoding = path.suffix == SUFFIX
                if self._remove(path, segment if is_encoding else None) and is_encoding:
                    removed.add(path.name)
            if remove_empty(directory):
                break
        return removed

    def _drop_older_versions(self) -> None:
        for path in children(self._layout.root):
            if self._layout.is_older_version(path.name):
                with storage_errors(path):
                    remove_tree(path)
