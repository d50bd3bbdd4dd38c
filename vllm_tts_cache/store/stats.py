"""What an encoding cache did, counted and frozen."""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_tts_cache.store.tiers.base import TierStats

_WARNING_INTERVAL_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """A snapshot of one process's cache.

    Attributes:
        hits: Callers answered, by the name of the tier that had the encoding.
        misses: Callers for whom no tier had it.
        encodes: Encodings made because of a miss.
        encode_failures: Attempts that raised.
        corrupt: Encodings that did not match their key; each counts as a miss.
        tier_errors: Calls that a tier could not answer.
        in_flight: Keys being encoded or waited for now.
        tiers: Each tier's own view, nearest first, without tiers that are broken
            now. Its hits and misses count every look, so they exceed the callers.
    """

    hits: Mapping[str, int]
    misses: int
    encodes: int
    encode_failures: int
    corrupt: int
    tier_errors: int
    in_flight: int
    tiers: Sequence[TierStats]

    @property
    def evictions(self) -> int:
        """Entries that tiers dropped to stay within their budgets."""
        return sum(tier.evictions for tier in self.tiers)

    def plain(self) -> dict[str, Any]:
        """Return nested dicts of str, int and None, which cross any process border."""
        return {
            "hits": dict(self.hits),
            "misses": self.misses,
            "encodes": self.encodes,
            "encode_failures": self.encode_failures,
            "evictions": self.evictions,
            "corrupt": self.corrupt,
            "tier_errors": self.tier_errors,
            "in_flight": self.in_flight,
            "tiers": {tier.name: _plain_tier(tier) for tier in self.tiers},
        }


class Counters:
    """Named counts that threads may add to."""

    def __init__(self) -> None:
        # A plain one: Counter looks a missing name up in Python, and every hit counts.
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def add(self, name: str) -> None:
        """Count one more."""
        with self._lock:
            self._counts[name] += 1

    def snapshot(self) -> Counter[str]:
        """Return a copy; a name never counted is 0."""
        with self._lock:
            return Counter(self._counts)


class ThrottledWarnings:
    """At most one warning a minute about each subject; a full disk fails every put."""

    def __init__(self, logger: logging.Logger):
        self._logger = logger
        self._last: dict[str, float] = {}

    def warn(self, subject: str, reason: Exception) -> None:
        """Log the reason, unless the subject had its warning recently."""
        now = time.monotonic()
        if now - self._last.get(subject, -_WARNING_INTERVAL_SECONDS) < (
            _WARNING_INTERVAL_SECONDS
        ):
            return
        self._last[subject] = now
        self._logger.warning("%s: %s", subject, reason)


def _plain_tier(tier: TierStats) -> dict[str, Any]:
    return {
        "entries": tier.entries,
        "bytes": tier.bytes,
        "max_bytes": tier.max_bytes,
        "max_entries": tier.max_entries,
        "hits": tier.hits,
        "misses": tier.misses,
        "evictions": tier.evictions,
        "segments": {s.value: asdict(stats) for s, stats in tier.segments.items()},
    }
