"""Read-through over the tiers: the one way the rest reads or writes encodings."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from vllm_tts_cache.errors import EncodingCorruptError, StorageError
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.fence import ForgetFence, Intent
from vllm_tts_cache.store.flights import FileFlights, LocalFlights
from vllm_tts_cache.store.keys import EncodingKey, Segment
from vllm_tts_cache.store.stats import CacheStats, Counters, ThrottledWarnings
from vllm_tts_cache.store.tiers.base import Tier

logger = logging.getLogger(__name__)

# Python 3.11 looks a member of an enum up in Python, which a memory hit can feel.
_REGISTERED = Segment.REGISTERED

P = ParamSpec("P")
T = TypeVar("T")


class EncodingCache:
    """Encodings in several tiers, nearest first, each encoded once.

    A tier that fails costs time, never a request; this class is where that is
    decided. Only ``forget`` reports a failure, because somebody relies on it.

    Args:
        tiers: Nearest first; at least one.
        flights: Where the processes that share a tier take turns to encode.
        turn_timeout_seconds: How long to wait for another process's encode before
            doing the same work beside it.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        flights: FileFlights,
        *,
        turn_timeout_seconds: float = 120.0,
    ):
        if not tiers:
            raise ValueError("a cache needs at least one tier")
        self._tiers = tuple(tiers)
        self._flights = flights
        self._turn_timeout_seconds = turn_timeout_seconds
        self._local: LocalFlights[EncodingKey, Encoding] = LocalFlights()
        self._fence = ForgetFence()
        self._counters = Counters()
        self._hits = Counters()
        self._warnings = ThrottledWarnings(logger)

    def get(self, key: EncodingKey, segment: Segment) -> Encoding | None:
        """Return the encoding from the nearest tier that has it; None on a miss."""
        if (encoding := self._nearest(key, segment)) is not None:
            return encoding
        with self._fence.intent(key.audio_sha256) as intent:
            encoding = self._farther(key, segment, intent)
        if encoding is None:
            self._counters.add("misses")
        return encoding

    def contains(self, key: EncodingKey) -> bool:
        """Whether some tier has the encoding; nothing is read or moved."""
        return any(self._attempt(tier, tier.contains, key) for tier in self._tiers)

    def is_durable(self, key: EncodingKey) -> bool:
        """Whether the farthest tier, which outlives the process, has the encoding."""
        farthest = self._tiers[-1]
        return bool(self._attempt(farthest, farthest.contains, key))

    def get_or_encode(
        self, key: EncodingKey, segment: Segment, encode: Callable[[], Encoding]
    ) -> Encoding:
        """Return the encoding, made by ``encode`` if no tier has it.

        Callers that miss one key at the same time, in this process or another,
        share one encode. If the audio is forgotten meanwhile they still get it,
        and no tier keeps it.

        Raises:
            Exception: Whatever ``encode`` raised, to all who waited for it; the
                next call tries again.
        """
        if (encoding := self._nearest(key, segment)) is not None:
            return encoding
        with self._fence.intent(key.audio_sha256) as intent:
            if (encoding := self._farther(key, segment, intent)) is not None:
                return encoding
            self._counters.add("misses")
            encoding = self._local.run(
                key, lambda: self._encoded(key, segment, encode, intent)
            )
            # Whoever waited may want it registered where the first caller did not,
            # or may have come after a forget that kept the first caller from
            # storing it. For all others this writes nothing.
            self._store(self._tiers, key, encoding, segment, intent)
            return encoding

    def put(self, key: EncodingKey, encoding: Encoding, segment: Segment) -> None:
        """Store an encoding in every tier that can."""
        with self._fence.intent(key.audio_sha256) as intent:
            self._store(self._tiers, key, encoding, segment, intent)

    def forget(self, audio_sha256: str) -> int:
        """Remove every encoding of one audio; return the entries removed, all tiers.

        An encode that is under way in this process will not be stored; one in
        another process is that process's to forget.

        Raises:
            StorageError: A tier may still have some. All tiers were tried.
        """
        num_removed, errors = 0, list[StorageError]()
        with self._fence.forgetting(audio_sha256):
            for tier in self._tiers:
                try:
                    num_removed += tier.forget(audio_sha256)
                except StorageError as exc:
                    self._counters.add("tier_errors")
                    errors.append(exc)
        if errors:
            raise errors[0]
        return num_removed

    def snapshot(self) -> CacheStats:
        """Return the counts since the start and what the tiers hold now."""
        stats = [self._attempt(tier, tier.stats) for tier in self._tiers]
        counts, hits = self._counters.snapshot(), self._hits.snapshot()
        return CacheStats(
            hits={tier.name: hits[tier.name] for tier in self._tiers},
            misses=counts["misses"],
            encodes=counts["encodes"],
            encode_failures=counts["encode_failures"],
            corrupt=counts["corrupt"],
            tier_errors=counts["tier_errors"],
            in_flight=len(self._local),
            tiers=tuple(tier for tier in stats if tier is not None),
        )

    def stats(self) -> dict[str, Any]:
        """Return the snapshot as plain data."""
        return self.snapshot().plain()

    def _encoded(
        self,
        key: EncodingKey,
        segment: Segment,
        encode: Callable[[], Encoding],
        intent: Intent,
    ) -> Encoding:
        with self._flights.turn(key, self._turn_timeout_seconds):
            # Another thread or process may have finished since the caller looked.
            found = self._nearest(key, segment) or self._farther(key, segment, intent)
            if found is not None:
                return found
            try:
                encoding = encode()
            except BaseException:
                self._counters.add("encode_failures")
                raise
            self._counters.add("encodes")
            # Before the turn ends: whoever has the next one looks there.
            self._store(self._tiers, key, encoding, segment, intent)
            return encoding

    def _nearest(self, key: EncodingKey, segment: Segment) -> Encoding | None:
        nearest = self._tiers[0]
        if segment is _REGISTERED and self._attempt(nearest, nearest.promote, key):
            # A hit ends the search here, so the tiers behind it would go on
            # treating a registered speaker as inline and evict it first.
            for tier in self._tiers[1:]:
                self._attempt(tier, tier.promote, key)
        return self._read(nearest, key, segment)

    def _farther(
        self, key: EncodingKey, segment: Segment, intent: Intent
    ) -> Encoding | None:
        for depth, tier in enumerate(self._tiers[1:], start=1):
            if (encoding := self._read(tier, key, segment)) is not None:
                self._store(self._tiers[:depth], key, encoding, segment, intent)
                return encoding
        return None

    def _read(self, tier: Tier, key: EncodingKey, segment: Segment) -> Encoding | None:
        encoding = self._attempt(tier, tier.get, key, segment)
        if encoding is not None:
            self._hits.add(tier.name)
        return encoding

    def _store(
        self,
        tiers: Sequence[Tier],
        key: EncodingKey,
        encoding: Encoding,
        segment: Segment,
        intent: Intent,
    ) -> None:
        with intent.writing() as is_allowed:
            for tier in tiers if is_allowed else ():
                self._attempt(tier, tier.put, key, encoding, segment)

    def _attempt(
        self, tier: Tier, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        try:
            return action(*args, **kwargs)
        except EncodingCorruptError as exc:
            self._counters.add("corrupt")
            self._warnings.warn(f"{tier.name} tier, corrupt encoding", exc)
        except StorageError as exc:
            self._counters.add("tier_errors")
            self._warnings.warn(f"{tier.name} tier", exc)
        return None
