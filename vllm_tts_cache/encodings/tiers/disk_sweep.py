"""Keep a directory of encodings within a budget: scan, plan, then execute."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_tts_cache.encodings.tiers.base import Budget
from vllm_tts_cache.encodings.tiers.disk_layout import SUFFIX

# A sweep frees a tenth of the budget, so that a full directory is not scanned
# again for every further put.
LOW_WATER = 0.9

_PUTS_PER_SCAN = 64
_SCAN_MAX_AGE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One encoding on disk."""

    path: Path
    num_bytes: int
    mtime: float


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Files that a sweep would remove, oldest first."""

    files: tuple[StoredFile, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that executing the plan frees."""
        return sum(file.num_bytes for file in self.files)

    def execute(self) -> int:
        """Remove the files; return how many were still there.

        Raises:
            OSError: A file could not be removed; the files after it are left.
        """
        num_removed = 0
        for file in self.files:
            num_removed += remove(file.path) is not None
            remove_empty(file.path.parent)
        return num_removed


class Usage:
    """What this process believes a segment holds.

    Other processes write as well, so the belief is refreshed now and then.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_entries = 0
        self._num_puts = 0
        self._scanned_at: float | None = None

    def add(self, num_bytes: int) -> None:
        """Count one more file."""
        self.num_bytes += num_bytes
        self.num_entries += 1
        self._num_puts += 1

    def subtract(self, num_bytes: int) -> None:
        """Count one file less; another process may have counted on our behalf."""
        self.num_bytes = max(0, self.num_bytes - num_bytes)
        self.num_entries = max(0, self.num_entries - 1)

    def replace(self, files: Iterable[StoredFile], now: float) -> None:
        """Take a scan's result for the truth."""
        sizes = [file.num_bytes for file in files]
        self.num_bytes, self.num_entries = sum(sizes), len(sizes)
        self._num_puts, self._scanned_at = 0, now

    def is_stale(self, now: float) -> bool:
        """Whether too much may have happened elsewhere since the last scan."""
        if self._scanned_at is None or self._num_puts >= _PUTS_PER_SCAN:
            return True
        return not 0 <= now - self._scanned_at < _SCAN_MAX_AGE_SECONDS


def plan_sweep(
    files: Iterable[StoredFile], budget: Budget, keep: Path | None = None
) -> SweepPlan:
    """Choose the least recently used files, if the budget is exceeded.

    Args:
        files: All files of the segment.
        budget: What they may amount to.
        keep: A file that has just been written for somebody who waits for it.
    """
    by_age = sorted(files, key=lambda file: (file.mtime, file.path))
    num_bytes, num_entries = sum(f.num_bytes for f in by_age), len(by_age)
    if budget.allows(num_bytes, num_entries):
        return SweepPlan(())
    target, chosen = _low_water(budget), list[StoredFile]()
    for file in by_age:
        if target.allows(num_bytes, num_entries):
            break
        if file.path != keep:
            chosen.append(file)
            num_bytes, num_entries = num_bytes - file.num_bytes, num_entries - 1
    return SweepPlan(tuple(chosen))


def scan(directory: Path) -> list[StoredFile]:
    """Return every encoding below a directory, in no order."""
    files: list[StoredFile] = []
    for path in walk(directory):
        if path.suffix == SUFFIX:
            with suppress(FileNotFoundError):  # evicted by another process
                status = path.lstat()
                files.append(StoredFile(path, status.st_size, status.st_mtime))
    return files


def walk(directory: Path) -> Iterator[Path]:
    """Yield every file below a directory, including ones that are not ours.

    Raises:
        OSError: A directory could not be read. One that vanished is not an error.
    """
    for parent, _, names in os.walk(directory, onerror=_raise_unless_gone):
        for name in names:
            yield Path(parent, name)


def remove(path: Path) -> int | None:
    """Remove one file; return the bytes freed, or None if it was gone."""
    try:
        num_bytes = path.lstat().st_size
        path.unlink()
    except FileNotFoundError:
        return None
    return num_bytes


def remove_empty(directory: Path) -> bool:
    """Remove a directory if nothing is in it; False if something is."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _low_water(budget: Budget) -> Budget:
    limit = budget.max_entries
    return Budget(
        int(budget.max_bytes * LOW_WATER),
        None if limit is None else int(limit * LOW_WATER),
    )


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
