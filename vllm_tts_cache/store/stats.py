"""What a cache holds and did, counted and frozen."""

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass

from vllm_tts_cache.catalogue.record import Segment


@dataclass(frozen=True, slots=True)
class Budget:
    """What one segment of a tier may hold; ``max_entries=None`` means bytes only."""

    max_bytes: int
    max_entries: int | None = None

    def __post_init__(self) -> None:
        if self.max_bytes < 0 or (self.max_entries or 0) < 0:
            raise ValueError(f"a budget must not be negative: {self}")

    def allows(self, num_bytes: int, num_entries: int) -> bool:
        """Whether this much stays within both limits."""
        if self.max_entries is not None and num_entries > self.max_entries:
            return False
        return num_bytes <= self.max_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStats:
    """What one segment holds and how it was used.

    Hits and misses count under the segment asked for, evictions under the segment
    that lost the entry.
    """

    entries: int
    bytes: int
    max_bytes: int
    max_entries: int | None
    hits: int
    misses: int
    evictions: int


@dataclass(frozen=True, slots=True)
class Held:
    """What pinned voices take, beside the segments."""

    entries: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats(SegmentStats):
    """A snapshot of one tier: the sums of its segments, and each of them.

    What is held counts pinned encodings too; ``max_entries`` is None if a segment has
    no such limit.
    """

    pinned: Held
    segments: dict[Segment, SegmentStats]

    @classmethod
    def of(cls, segments: dict[Segment, SegmentStats], pinned: Held) -> "TierStats":
        """Sum the segments."""
        all_ = segments.values()
        limits = [s.max_entries for s in all_]
        known = [limit for limit in limits if limit is not None]
        return cls(
            entries=pinned.entries + sum(s.entries for s in all_),
            bytes=pinned.bytes + sum(s.bytes for s in all_),
            max_bytes=sum(s.max_bytes for s in all_),
            max_entries=sum(known) if len(known) == len(limits) else None,
            hits=sum(s.hits for s in all_),
            misses=sum(s.misses for s in all_),
            evictions=sum(s.evictions for s in all_),
            pinned=pinned,
            segments=segments,
        )


@dataclass(slots=True)
class Traffic:
    """Counts of one segment; its owner's lock guards it."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """A snapshot of one process's cache; taking it looks at no disk.

    Attributes:
        hits: Callers answered, from ``memory`` and from ``disk``.
        misses: Callers for whom neither had it.
        corrupt: Encodings that did not match their key; each counts as a miss.
        tier_errors: Calls that the disk could not answer.
        memory: The memory's own view. Its hits and misses count every look, so they
            exceed the callers.
    """

    hits: dict[str, int]
    misses: int
    corrupt: int
    tier_errors: int
    memory: TierStats


class Counters:
    """Named counts that threads may add to."""

    def __init__(self) -> None:
        # A plain one: Counter looks a missing name up in Python, and every hit counts.
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def add(self, name: str, number: int = 1) -> None:
        """Count so many more."""
        with self._lock:
            self._counts[name] += number

    def snapshot(self) -> Counter[str]:
        """Return a copy; a name never counted is 0."""
        with self._lock:
            return Counter(self._counts)
