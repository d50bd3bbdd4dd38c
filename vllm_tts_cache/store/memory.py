"""Encodings in this process's memory, bounded in bytes and in entries."""

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from vllm_tts_cache.catalogue.records import Segment
from vllm_tts_cache.store.encoding import Encoding, EncodingKey


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats(SegmentStats):
    """A snapshot of one tier: the sums of its segments, and each of them.

    ``max_entries`` is None if a segment has no such limit.
    """

    segments: dict[Segment, SegmentStats]

    @classmethod
    def of(cls, segments: dict[Segment, SegmentStats]) -> "TierStats":
        """Sum the segments."""
        all_ = segments.values()
        known = [s.max_entries for s in all_ if s.max_entries is not None]
        added = "entries", "bytes", "max_bytes", "hits", "misses", "evictions"
        return cls(
            **{name: sum(getattr(s, name) for s in all_) for name in added},
            max_entries=sum(known) if len(known) == len(all_) else None,
            segments=segments,
        )


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


class Sized(Protocol):
    """What knows the memory that it takes."""

    @property
    def num_bytes(self) -> int:
        """Bytes, near enough."""
        ...


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Sized)


class LruSegment(Generic[K, V]):
    """Values by key; its owner moves what was used to the end, and locks.

    Attributes:
        budget: Bytes and entries at most.
        entries: The values, least recently used first.
        num_bytes: Sum of all values.
        hits: Counted by its owner.
        misses: Counted by its owner.
        evictions: Values that went for others.
    """

    __slots__ = ("budget", "entries", "evictions", "hits", "misses", "num_bytes")

    def __init__(self, budget: Budget):
        self.budget = budget
        self.entries: OrderedDict[K, V] = OrderedDict()
        self.num_bytes = self.hits = self.misses = self.evictions = 0

    def fits(self, value: V) -> bool:
        """Whether the value is within the budget by itself."""
        return self.budget.allows(value.num_bytes, 1)

    def add(self, key: K, value: V) -> list[K]:
        """Hold a value that `fits` and whose key is not here; return evicted keys."""
        self.entries[key] = value
        self.num_bytes += value.num_bytes
        evicted = list[K]()
        while not self.budget.allows(self.num_bytes, len(self.entries)):
            evicted.append(oldest := next(iter(self.entries)))
            self.remove(oldest)
        self.evictions += len(evicted)
        return evicted

    def remove(self, key: K) -> V:
        """Return the value and forget it. Raises: KeyError."""
        value = self.entries.pop(key)
        self.num_bytes -= value.num_bytes
        return value

    def clear(self) -> int:
        """Remove every value; return how many there were."""
        num_entries = len(self.entries)
        self.entries.clear()
        self.num_bytes = 0
        return num_entries

    def stats(self) -> SegmentStats:
        """Return the counts and sizes as of now."""
        return SegmentStats(
            entries=len(self.entries),
            bytes=self.num_bytes,
            max_bytes=self.budget.max_bytes,
            max_entries=self.budget.max_entries,
            hits=self.hits,
            misses=self.misses,
            evictions=self.evictions,
        )


# Python 3.11 looks a member of an enum up in Python, which a hit can feel.
_REGISTERED = Segment.REGISTERED

# Addresses that were deleted, kept for writes that began before.
_MAX_DELETED = 4096

_Encodings = LruSegment[EncodingKey, Encoding]


class MemoryTier:
    """Least-recently-used encodings per segment.

    Each segment has its own budget, so no amount of inline traffic can push a
    registered speaker out. Any thread may call any method.

    Attributes:
        num_deletes: How often something was deleted; to be read before what is `put`.
        oldest_known_delete: Of deletions after this number it is known of which audio.
    """

    def __init__(self, budgets: Mapping[Segment, Budget]):
        self._registered = _Encodings(budgets[Segment.REGISTERED])
        self._inline = _Encodings(budgets[Segment.INLINE])
        self._by_audio: defaultdict[str, set[EncodingKey]] = defaultdict(set)
        self._deleted: OrderedDict[str, int] = OrderedDict()
        self.num_deletes = self.oldest_known_delete = 0
        self._lock = threading.Lock()

    def get(self, key: EncodingKey, segment: Segment) -> Encoding | None:
        """Return the encoding and mark it recently used."""
        with self._lock:
            # Most of what is asked for is here, and every look costs a hash.
            encoding = self._registered.entries.get(key)
            if encoding is not None:
                self._registered.entries.move_to_end(key)
            elif (encoding := self._inline.entries.get(key)) is not None:
                self._inline.entries.move_to_end(key)
                if segment is _REGISTERED:
                    self._promote(key)
            asked = self._segment(segment)
            if encoding is None:
                asked.misses += 1
            else:
                asked.hits += 1
            return encoding

    def put(
        self, key: EncodingKey, encoding: Encoding, segment: Segment, *, since: int
    ) -> None:
        """Keep the encoding, evicting the oldest ones; skip one that cannot fit.

        ``since`` is `num_deletes` from before it was read or made: if its audio was
        deleted after that, it is not kept.
        """
        with self._lock:
            # What was deleted longer ago than is known may have been this audio.
            known = self._deleted.get(key.audio_sha256, 0)
            if max(known, self.oldest_known_delete) > since:
                return
            if (holder := self._holder(key)) is None:
                self._add(self._segment(segment), key, encoding)
                return
            # One key, one value: what is there already is what was given.
            holder.entries.move_to_end(key)
            if segment is Segment.REGISTERED and holder is self._inline:
                self._promote(key)

    def contains(self, key: EncodingKey) -> bool:
        """Whether the encoding is here; it does not count as a use."""
        with self._lock:
            return self._holder(key) is not None

    def delete(self, audio_sha256: str) -> int:
        """Delete every encoding of one audio, without looking at the others."""
        with self._lock:
            self.num_deletes += 1
            self._deleted[audio_sha256] = self.num_deletes
            self._deleted.move_to_end(audio_sha256)
            if len(self._deleted) > _MAX_DELETED:
                _, self.oldest_known_delete = self._deleted.popitem(last=False)
            keys = self._by_audio.pop(audio_sha256, set())
            for key in keys:
                if (holder := self._holder(key)) is not None:
                    holder.remove(key)
            return len(keys)

    def delete_all(self) -> int:
        """Delete every encoding, and keep none that is being read or made by now."""
        with self._lock:
            self.num_deletes += 1
            self.oldest_known_delete = self.num_deletes
            self._deleted.clear()
            self._by_audio.clear()
            return self._registered.clear() + self._inline.clear()

    def stats(self) -> TierStats:
        """Return what is held now and how it was used since the start."""
        with self._lock:
            stats = {segment: self._segment(segment).stats() for segment in Segment}
        return TierStats.of(stats)

    def _segment(self, segment: Segment) -> _Encodings:
        return self._registered if segment is _REGISTERED else self._inline

    def _holder(self, key: EncodingKey) -> _Encodings | None:
        segments = self._registered, self._inline
        return next((holder for holder in segments if key in holder.entries), None)

    def _add(self, holder: _Encodings, key: EncodingKey, encoding: Encoding) -> None:
        if not holder.fits(encoding):
            return
        self._by_audio[key.audio_sha256].add(key)
        for evicted in holder.add(key, encoding):
            siblings = self._by_audio[evicted.audio_sha256]
            siblings.discard(evicted)
            if not siblings:
                del self._by_audio[evicted.audio_sha256]

    def _promote(self, key: EncodingKey) -> None:
        """Move an inline entry to the registered segment, if it fits there."""
        encoding = self._inline.entries[key]
        if self._registered.fits(encoding):
            self._inline.remove(key)
            self._add(self._registered, key, encoding)
