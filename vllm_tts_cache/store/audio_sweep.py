"""Which inline files to drop, as a value that can be shown before it is executed."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_tts_cache.files import storage_errors


@dataclass(frozen=True, slots=True)
class SweepEntry:
    """One file as the scan saw it."""

    path: Path
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """Files to drop, oldest first, and the bytes that stay."""

    drop: tuple[SweepEntry, ...]
    kept_bytes: int

    @property
    def freed_bytes(self) -> int:
        """What executing the plan frees."""
        return sum(entry.num_bytes for entry in self.drop)

    def execute(self) -> None:
        """Remove the files; one that is gone already is as good as removed.

        Raises:
            StorageError: A file cannot be removed; those before it are.
        """
        for entry in self.drop:
            with storage_errors(entry.path):
                entry.path.unlink(missing_ok=True)


def plan_sweep(
    entries: Iterable[SweepEntry], target_bytes: int, keep: Path | None = None
) -> SweepPlan:
    """Drop least recently used entries until at most ``target_bytes`` stay.

    ``keep`` stays even where it alone is larger: somebody is about to read it.
    """
    oldest_first = sorted(entries, key=lambda entry: (entry.mtime_ns, entry.path))
    kept_bytes = sum(entry.num_bytes for entry in oldest_first)
    drop: list[SweepEntry] = []
    for entry in oldest_first:
        if kept_bytes <= target_bytes:
            break
        if entry.path != keep:
            drop.append(entry)
            kept_bytes -= entry.num_bytes
    return SweepPlan(drop=tuple(drop), kept_bytes=kept_bytes)
