"""Keep a directory of encodings within a budget: scan, plan, then execute."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_tts_cache.store.tiers.base import Budget
from vllm_tts_cache.store.tiers.disk_files import remove, remove_empty, walk
from vllm_tts_cache.store.tiers.disk_layout import SUFFIX

# A sweep frees a tenth of the budget, so that a full directory is not scanned
# again for every further put.
LOW_WATER = 0.9


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


def _low_water(budget: Budget) -> Budget:
    limit = budget.max_entries
    return Budget(
        int(budget.max_bytes * LOW_WATER),
        None if limit is None else int(limit * LOW_WATER),
    )
