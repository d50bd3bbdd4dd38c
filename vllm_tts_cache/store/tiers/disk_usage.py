"""What one process believes a directory of encodings holds, and how it used it."""

import threading
from collections.abc import Callable, Iterable, Mapping

from vllm_tts_cache.store.keys import Segment
from vllm_tts_cache.store.tiers.base import Budget, SegmentStats, Traffic
from vllm_tts_cache.store.tiers.disk_sweep import StoredFile

_PUTS_PER_SCAN = 64
_SCAN_MAX_AGE_SECONDS = 300.0


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


class Ledger:
    """Usage and traffic of every segment, behind one lock."""

    def __init__(self, budgets: Mapping[Segment, Budget], clock: Callable[[], float]):
        self._budgets = budgets
        self._clock = clock
        self._usage = {segment: Usage() for segment in Segment}
        self._traffic = {segment: Traffic() for segment in Segment}
        self._lock = threading.Lock()

    def count(self, segment: Segment, *, hit: bool) -> None:
        """Count one look."""
        with self._lock:
            if hit:
                self._traffic[segment].hits += 1
            else:
                self._traffic[segment].misses += 1

    def add(self, segment: Segment, num_bytes: int) -> bool:
        """Count one more file; True if the segment is to be scanned now."""
        budget, usage = self._budgets[segment], self._usage[segment]
        with self._lock:
            usage.add(num_bytes)
            is_over = not budget.allows(usage.num_bytes, usage.num_entries)
            return is_over or usage.is_stale(self._clock())

    def subtract(self, segment: Segment, num_bytes: int) -> None:
        """Count one file less."""
        with self._lock:
            self._usage[segment].subtract(num_bytes)

    def scanned(
        self, segment: Segment, files: Iterable[StoredFile], num_evicted: int
    ) -> None:
        """Take a scan's result for the truth, and count what was evicted after it."""
        with self._lock:
            self._usage[segment].replace(files, self._clock())
            self._traffic[segment].evictions += num_evicted

    def is_stale(self, segment: Segment) -> bool:
        """Whether the segment is to be scanned before anybody is told what it holds."""
        with self._lock:
            return self._usage[segment].is_stale(self._clock())

    def stats(self) -> dict[Segment, SegmentStats]:
        """Return what is believed now."""
        with self._lock:
            return {
                segment: self._traffic[segment].stats(
                    budget,
                    self._usage[segment].num_bytes,
                    self._usage[segment].num_entries,
                )
                for segment, budget in self._budgets.items()
            }
