"""The contract every tier keeps; tests/contract/store checks it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.keys import EncodingKey, Segment


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
    """A snapshot of one tier: per segment, and summed."""

    name: str
    segments: Mapping[Segment, SegmentStats]

    @property
    def entries(self) -> int:
        """Encodings held."""
        return sum(s.entries for s in self.segments.values())

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return sum(s.bytes for s in self.segments.values())

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
        """Entries dropped to stay within a budget."""
        return sum(s.evictions for s in self.segments.values())


@dataclass(slots=True)
class Traffic:
    """Counts of one segment; its owner's lock guards it."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0

    def stats(self, budget: Budget, num_bytes: int, num_entries: int) -> SegmentStats:
        """Freeze the counts beside what is held."""
        return SegmentStats(
            entries=num_entries,
            bytes=num_bytes,
            max_bytes=budget.max_bytes,
            max_entries=budget.max_entries,
            hits=self.hits,
            misses=self.misses,
            evictions=self.evictions,
        )


class Tier(Protocol):
    """One place encodings can be. Every method may be called from any thread."""

    @property
    def name(self) -> str:
        """Short name for logs and counters."""
        ...

    def get(self, key: EncodingKey, segment: Segment) -> Encoding | None:
        """Return the encoding, whichever segment holds it; None on a miss.

        Asked for as registered, an inline entry becomes a registered one; asked
        for as inline, a registered entry stays registered.

        Raises:
            EncodingCorruptError: The bytes are wrong. The tier has set them aside.
            StorageError: The tier could not answer; the encoding may still be there.
        """
        ...

    def put(self, key: EncodingKey, encoding: Encoding, segment: Segment) -> None:
        """Store the encoding, or skip one that can never fit.

        Storing a stored key writes nothing; like ``get``, it may promote.

        Raises:
            StorageError: It may not be stored, or the segment exceeds its budget.
        """
        ...

    def contains(self, key: EncodingKey) -> bool:
        """Whether the encoding is here, in any segment; reads and moves nothing.

        A tier that outlives the process may count it as a use.
        """
        ...

    def promote(self, key: EncodingKey) -> bool:
        """Make an inline entry a registered one; False if nothing changed.

        Raises:
            StorageError: It stays where it was.
        """
        ...

    def delete(self, key: EncodingKey) -> bool:
        """Remove the encoding from both segments; False if it was in neither.

        Raises:
            StorageError: It may still be there.
        """
        ...

    def forget(self, audio_sha256: str) -> int:
        """Remove every encoding of one audio; return how many there were.

        Raises:
            StorageError: Some may still be there.
        """
        ...

    def stats(self) -> TierStats:
        """Return what is held now and how it was used since the start.

        Raises:
            StorageError: The tier could not answer.
        """
        ...
