"""What a cache holds and did, counted and frozen."""

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

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
class TierStats:
    """A snapshot of one tier: per segment, and summed; pinned entries are extra."""

    name: str
    segments: Mapping[Segment, SegmentStats]
    pinned_entries: int = 0
    pinned_bytes: int = 0

    @property
    def entries(self) -> int:
        """Encodings held."""
        return self.pinned_entries + sum(s.entries for s in self.segments.values())

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return self.pinned_bytes + sum(s.bytes for s in self.segments.values())

    @property
    def max_bytes(self) -> int:
        """Bytes that may be held."""
        return sum(s.max_bytes for s in self.segments.values())

    @property
    def max_entries(self) -> int | None:
        """Encodings that may be held; None if a segment has no such limit."""
        limits = [s.max_entries for s in self.segments.values()]
        known = [limit for limit in limits if limit is not None]
        return sum(known) if len(known) == len(limits) else None

    @property
    def hits(self) -> int:
        """Gets that were answered."""
        return sum(s.hits for s in self.segments.values())

    @property
    def misses(self) -> int:
        """Gets that were not."""
        return sum(s.misses for s in self.segments.values())

    @property
    def evictions(self) -> int:
        """Entries evicted to stay within a budget."""
        return sum(s.evictions for s in self.segments.values())


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

    hits: Mapping[str, int]
    misses: int
    corrupt: int
    tier_errors: int
    memory: TierStats

    @property
    def evictions(self) -> int:
        """Entries that the memory evicted to stay within its budget."""
        return self.memory.evictions

    def plain(self) -> dict[str, Any]:
        """Return nested dicts of str, int and None, which cross any process border."""
        return {
            "hits": dict(self.hits),
            "misses": self.misses,
            "evictions": self.evictions,
            "corrupt": self.corrupt,
            "tier_errors": self.tier_errors,
            "tiers": {self.memory.name: _plain_tier(self.memory)},
        }


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


def _plain_tier(tier: TierStats) -> dict[str, Any]:
    return {
        "entries": tier.entries,
        "bytes": tier.bytes,
        "max_bytes": tier.max_bytes,
        "max_entries": tier.max_entries,
        "hits": tier.hits,
        "misses": tier.misses,
        "evictions": tier.evictions,
        "pinned": {"entries": tier.pinned_entries, "bytes": tier.pinned_bytes},
        "segments": {s.value: asdict(stats) for s, stats in tier.segments.items()},
    }
