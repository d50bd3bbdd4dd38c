"""What is kept in memory within a budget, least recently used first."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from vllm_tts_cache.store.stats import Budget, SegmentStats, Traffic


class Sized(Protocol):
    """What knows the memory that it takes."""

    @property
    def num_bytes(self) -> int:
        """Bytes, near enough."""
        ...


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Sized)


class Shelf(Generic[K, V]):
    """Values by key. Its owner says when one was used, and guards it.

    Attributes:
        budget: What it may hold.
        entries: The values, least recently used first.
        num_bytes: Of all of them.
        traffic: What its owner counts, but for evictions.
    """

    __slots__ = ("budget", "entries", "num_bytes", "traffic")

    def __init__(self, budget: Budget):
        self.budget = budget
        self.entries: OrderedDict[K, V] = OrderedDict()
        self.num_bytes = 0
        self.traffic = Traffic()

    def fits(self, value: V) -> bool:
        """Whether it could be held alone."""
        return self.budget.allows(value.num_bytes, 1)

    def add(self, key: K, value: V) -> list[K]:
        """Hold a value that `fits` and whose key is not here.

        Returns the keys that had to go for it.
        """
        self.entries[key] = value
        self.num_bytes += value.num_bytes
        evicted = list[K]()
        while not self.budget.allows(self.num_bytes, len(self.entries)):
            evicted.append(oldest := next(iter(self.entries)))
            self.remove(oldest)
        self.traffic.evictions += len(evicted)
        return evicted

    def remove(self, key: K) -> V:
        """Hold it no longer. Raises: KeyError."""
        value = self.entries.pop(key)
        self.num_bytes -= value.num_bytes
        return value

    def clear(self) -> int:
        """Hold nothing; returns how many there were."""
        num_entries = len(self.entries)
        self.entries.clear()
        self.num_bytes = 0
        return num_entries

    def stats(self) -> SegmentStats:
        """Freeze the counts beside what is held."""
        return SegmentStats(
            entries=len(self.entries),
            bytes=self.num_bytes,
            max_bytes=self.budget.max_bytes,
            max_entries=self.budget.max_entries,
            hits=self.traffic.hits,
            misses=self.traffic.misses,
            evictions=self.traffic.evictions,
        )
