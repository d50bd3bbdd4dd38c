"""A worker's cache of encodings: its memory in front of the store.

The memory is bounded in bytes and in entries.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import AWAY, EncodingCorruptError, StorageError
from vllm_tts_cache.logs import Counters, ThrottledLog
from vllm_tts_cache.store.encoding import Encoding, EncodingKey

if TYPE_CHECKING:
    from vllm_tts_cache.store.speaker_store import SpeakerStore


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one segment."""

    max_bytes: int
    max_entries: int = sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStats:
    """What one segment holds and how it was used.

    Hits and misses count under the requested segment, evictions under the segment
    that lost the entry.
    """

    entries: int
    bytes: int
    max_bytes: int
    max_entries: int
    hits: int
    misses: int
    evictions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats(SegmentStats):
    """A snapshot of one tier: the sums of its segments, and each of them."""

    segments: dict[Segment, SegmentStats]

    @classmethod
    def of(cls, segments: dict[Segment, SegmentStats]) -> "TierStats":
        """Sum the segments."""
        names, all_ = [f.name for f in fields(SegmentStats)], segments.values()
        sums = {name: sum(getattr(s, name) for s in all_) for name in names}
        return cls(**sums, segments=segments)


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Any)  # has ``num_bytes``, about


class LruSegment(Generic[K, V]):
    """LRU values by key; its owner locks it, and moves used entries to the end.

    Attributes:
        budget: Bytes and entries at most.
        entries: The values, least recently used first.
        num_bytes: Sum of all values.
        hits: Counted by its owner.
        misses: Counted by its owner.
        evictions: Values removed to make room for others.
    """

    __slots__ = ("budget", "entries", "evictions", "hits", "misses", "num_bytes")

    def __init__(self, budget: Budget):
        self.budget = budget
        self.entries: OrderedDict[K, V] = OrderedDict()
        self.num_bytes = self.hits = self.misses = self.evictions = 0

    def add(self, key: K, value: V) -> bool:
        """Add a value whose key is new, and evict others.

        False, and nothing is changed, for a value that is over the budget by itself.
        """
        max_bytes, max_entries = self.budget.max_bytes, self.budget.max_entries
        if value.num_bytes > max_bytes or max_entries == 0:
            return False
        self.entries[key] = value
        self.num_bytes += value.num_bytes
        while self.num_bytes > max_bytes or len(self.entries) > max_entries:
            self.remove(next(iter(self.entries)))
            self.evictions += 1
        return True

    def remove(self, key: K) -> V:
        """Remove and return the value. Raises: KeyError."""
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


# Python 3.11 looks up an enum's member in Python code, which would slow each hit.
_REGISTERED = Segment.REGISTERED

# Deleted addresses that are kept, for a `put` whose read or encode began before.
_MAX_DELETED = 4096

_Encodings = LruSegment[EncodingKey, Encoding]


class MemoryTier:
    """Least-recently-used encodings per segment.

    Each segment has its own budget, so no amount of inline traffic can push a
    registered speaker out. Any thread may call any method.

    Attributes:
        num_deletes: Deletions so far; callers read it before they make what they `put`.
        oldest_known_delete: Deletions up to this number may have been of any audio.
    """

    def __init__(self, budgets: Mapping[Segment, Budget]):
        self._registered = _Encodings(budgets[Segment.REGISTERED])
        self._inline = _Encodings(budgets[Segment.INLINE])
        self._artifacts = set[str]()  # encoders of which it has had encodings: a few
        self._deleted: OrderedDict[str, int] = OrderedDict()
        self.num_deletes = self.oldest_known_delete = 0
        self._lock = threading.Lock()

    def get(self, key: EncodingKey, segment: Segment) -> Encoding | None:
        """Return the encoding and mark it recently used; None on a miss."""
        with self._lock:
            # Registered first: most requests are for it, and each lookup hashes.
            encoding = self._registered.entries.get(key)
            if encoding is not None:
                self._registered.entries.move_to_end(key)
            elif (encoding := self._inline.entries.get(key)) is not None:
                self._inline.entries.move_to_end(key)
                if segment is _REGISTERED:
                    self._promote(key)
            asked = self._registered if segment is _REGISTERED else self._inline
            if encoding is None:
                asked.misses += 1
            else:
                asked.hits += 1
            return encoding

    def put(
        self, key: EncodingKey, encoding: Encoding, segment: Segment, *, since: int
    ) -> bool:
        """Keep the encoding, evicting the oldest ones; False for one that cannot fit.

        ``since`` is `num_deletes` from before it was read or made: if its audio was
        deleted after that, it is not kept.
        """
        with self._lock:
            # A deletion whose audio is not known may have been of this one.
            known = self._deleted.get(key.audio_sha256, 0)
            if max(known, self.oldest_known_delete) > since:
                return False
            for holder in (self._registered, self._inline):
                if key in holder.entries:
                    # A key has one value: the entry equals what was given.
                    holder.entries.move_to_end(key)
                    if holder is self._inline and segment is _REGISTERED:
                        self._promote(key)
                    return True
            self._artifacts.add(key.encoder_fingerprint)
            asked = self._registered if segment is _REGISTERED else self._inline
            return asked.add(key, encoding)

    def contains(self, key: EncodingKey) -> bool:
        """Whether the encoding is in memory; does not count as a use."""
        with self._lock:
            return key in self._registered.entries or key in self._inline.entries

    def delete(self, audio_sha256: str) -> int:
        """Delete every encoding of one audio; return how many there were."""
        with self._lock:
            self.num_deletes += 1
            self._deleted[audio_sha256] = self.num_deletes
            self._deleted.move_to_end(audio_sha256)
            if len(self._deleted) > _MAX_DELETED:
                _, self.oldest_known_delete = self._deleted.popitem(last=False)
            num_deleted = 0
            for artifact in self._artifacts:
                key = EncodingKey(
                    audio_sha256=audio_sha256, encoder_fingerprint=artifact
                )
                for holder in (self._registered, self._inline):
                    if key in holder.entries:
                        holder.remove(key)
                        num_deleted += 1
            return num_deleted

    def delete_all(self) -> int:
        """Delete every encoding, and refuse those that are being read or made now."""
        with self._lock:
            self.num_deletes += 1
            self.oldest_known_delete = self.num_deletes
            self._deleted.clear()
            self._artifacts.clear()
            return self._registered.clear() + self._inline.clear()

    def stats(self) -> TierStats:
        """Return what is held now and how it was used since the start."""
        with self._lock:
            registered, inline = self._registered.stats(), self._inline.stats()
        return TierStats.of({Segment.REGISTERED: registered, Segment.INLINE: inline})

    def _promote(self, key: EncodingKey) -> None:
        """Move an inline entry to the registered segment, if it fits there."""
        if self._registered.add(key, self._inline.entries[key]):
            self._inline.remove(key)


class EncodingCache:
    """Encodings in this process's memory, and in the store behind it.

    This class decides that a disk that fails costs a request time, and never fails it.

    Attributes:
        memory: Encodings in memory; refuses those deleted while they were read or made.
    """

    def __init__(self, memory: MemoryTier, store: "SpeakerStore"):
        self.memory = memory
        self._store = store
        self._counters = Counters()
        self._log = ThrottledLog()

    def get(self, key: EncodingKey, segment: Segment) -> Encoding | None:
        """Return the encoding, from memory or else from this disk; None on a miss."""
        if (encoding := self.memory.get(key, segment)) is not None:
            self._counters.add("memory")
            return encoding
        since = self.memory.num_deletes
        try:
            encoding = self._store.read_here(key)
        except StorageError as exc:
            self._count_error(exc)
        if encoding is None:
            self._counters.add("misses")
            return None
        self._counters.add("disk")
        self.memory.put(key, encoding, segment, since=since)
        return encoding

    def put(
        self, key: EncodingKey, encoding: Encoding, segment: Segment, *, since: int
    ) -> bool:
        """Publish the encoding and keep it in memory; False if neither has it.

        If its audio was deleted neither keeps it; if the disk fails only memory does,
        and a row says when a registered voice's is stored again. ``since`` is as of
        `MemoryTier.put`.
        """
        is_stored = True
        try:
            if not self._store.writer.publish(key, encoding):
                return False
        except StorageError as exc:
            self._count_error(exc)
            is_stored = False
            # What is away takes no row either, or is back before one is due.
            if segment is _REGISTERED and not isinstance(exc, AWAY):
                with suppress(StorageError):
                    self._store.note_failed(key, f"it was not stored: {exc}")
        return self.memory.put(key, encoding, segment, since=since) or is_stored

    def load(self, key: EncodingKey, segment: Segment) -> bool:
        """Bring a stored encoding into memory or else onto this disk; False if neither.

        It may wait for an object store, and counts neither a hit nor a miss.
        """
        since = self.memory.num_deletes
        try:
            encoding = self._store.read(key)
        except StorageError as exc:
            self._count_error(exc)
            return False
        return encoding is not None and (
            self.memory.put(key, encoding, segment, since=since) or self.is_stored(key)
        )

    def is_stored(self, key: EncodingKey) -> bool:
        """Whether the disk, which outlives the process, has the encoding.

        One ``stat``, no query, no lock.
        """
        try:
            return self._store.files.exists(key.audio_sha256, key.encoder_fingerprint)
        except StorageError as exc:
            self._count_error(exc)
            return False

    def stats(self) -> dict[str, Any]:
        """Return fields of `SpeakerStats`: the counts, and what the memory holds now.

        This uses no disk.
        """
        counts = self._counters.snapshot()
        memory = self.memory.stats()
        return {
            "hits": {name: counts[name] for name in ("memory", "disk")},
            "misses": counts["misses"],
            "evictions": memory.evictions,
            "corrupt": counts["corrupt"],
            "tier_errors": counts["tier_errors"],
            "tiers": {"memory": memory},
        }

    def _count_error(self, error: StorageError) -> None:
        if isinstance(error, EncodingCorruptError):
            self._counters.add("corrupt")
            self._log.warn_of("corrupt encoding", "%s; it is made again", error)
        else:
            self._counters.add("tier_errors")
            self._log.warn_of("stored encodings", "Storage failed: %s", error.log_text)


def open_cache(settings: Settings, store: "SpeakerStore") -> EncodingCache:
    """Open a worker's cache with the memory budgets of the settings."""
    share, max_bytes = settings.inline_share, settings.memory_max_bytes
    inline = Budget(int(max_bytes * share), int(settings.memory_max_entries * share))
    registered = Budget(
        max_bytes - inline.max_bytes, settings.memory_max_entries - inline.max_entries
    )
    budgets = {Segment.REGISTERED: registered, Segment.INLINE: inline}
    return EncodingCache(MemoryTier(budgets), store)
