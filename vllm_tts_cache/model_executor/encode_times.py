"""How long encodes took and waited, counted where they happen."""

import threading
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.speaker.wire import (
    DURATION_BOUNDS_SECONDS,
    Durations,
    EncodeTimes,
)


@dataclass(slots=True)
class _Counted:
    counts: list[int] = field(
        default_factory=lambda: [0] * (len(DURATION_BOUNDS_SECONDS) + 1)
    )
    total_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        # A bound counts what is as long as it.
        self.counts[bisect_left(DURATION_BOUNDS_SECONDS, seconds)] += 1
        self.total_seconds += seconds

    def to_wire(self) -> Durations:
        return Durations(counts=list(self.counts), total_seconds=self.total_seconds)


class EncodeClock:
    """Counts encodes by encoder and segment since the start; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._encode: dict[tuple[str, Segment], _Counted] = {}
        self._queue: dict[tuple[str, Segment], _Counted] = {}
        self._num_failed: Counter[str] = Counter()

    def add(
        self,
        encoder: str,
        segment: Segment,
        *,
        encode_seconds: float,
        queue_seconds: float,
    ) -> None:
        """Count an encode that went well."""
        with self._lock:
            key = encoder, segment
            self._encode.setdefault(key, _Counted()).add(encode_seconds)
            self._queue.setdefault(key, _Counted()).add(queue_seconds)

    def fail(self, encoder: str) -> None:
        """Count one that did not."""
        with self._lock:
            self._num_failed[encoder] += 1

    def num_failed(self, encoder: str) -> int:
        """Return how many of an encoder's did not go well."""
        return self._num_failed[encoder]

    def times(self) -> list[EncodeTimes]:
        """Return what was counted so far."""
        with self._lock:
            return [
                EncodeTimes(
                    encoder=encoder,
                    segment=segment.value,
                    encode=counted.to_wire(),
                    queue=self._queue[encoder, segment].to_wire(),
                )
                for (encoder, segment), counted in self._encode.items()
            ]
