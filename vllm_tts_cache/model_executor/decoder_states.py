"""What a decoder computes of voices and not of requests, kept for later requests."""

import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from vllm_tts_cache.speaker.wire import DecoderStats, Deleted
from vllm_tts_cache.store.memory import Budget, LruSegment

# A request that has its prompt may reach the decoder after its voice was deleted, so
# that nothing is kept of such a voice for so long. It may be registered again.
DELETED_SECONDS = 600.0
# Of more voices than that it is not known which they were; then of none.
_MAX_DELETED = 4096


@dataclass(frozen=True, slots=True)
class DecoderState:
    """A state, and what it takes.

    Attributes:
        value: Shared by requests: nobody writes into it.
        num_bytes: Of its tensors.
    """

    value: Any
    num_bytes: int


class DecoderStates:
    """States by content; those used longest ago go. For the thread of one stage.

    Args:
        max_bytes: Of all that are kept.
        clock: Seconds that never go back.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._shelf: LruSegment[tuple[str, str], DecoderState] = LruSegment(
            Budget(max_bytes)
        )
        # Until when nothing is kept: of a voice, and of all.
        self._deleted: OrderedDict[str, float] = OrderedDict()
        self._all_deleted = 0.0
        self._worker_id = uuid.uuid4().hex
        self._num_calls: Counter[str] = Counter()

    def get(
        self, audio_sha256: str | None, digest: str, make: Callable[[], DecoderState]
    ) -> Any:
        """Return a state, made if it is not there.

        Args:
            audio_sha256: Of a registered voice; None for one whose state is not kept.
            digest: Of what it is computed from.
            make: Computes it.
        """
        key = (audio_sha256 or "", digest)
        if (state := self._shelf.entries.get(key)) is not None:
            self._shelf.entries.move_to_end(key)
            self._shelf.traffic.hits += 1
            return state.value
        state = make()
        self._shelf.traffic.misses += 1
        if audio_sha256 is not None and self._may_keep(audio_sha256, state):
            self._shelf.add(key, state)
        return state.value

    def delete(self, audio_sha256s: Collection[str]) -> Deleted:
        """Delete states, and keep none of these voices for a while."""
        until = self._clock() + DELETED_SECONDS
        for sha in audio_sha256s:
            self._deleted[sha] = until
            self._deleted.move_to_end(sha)
        while len(self._deleted) > _MAX_DELETED:
            _, known_no_more = self._deleted.popitem(last=False)
            self._all_deleted = max(self._all_deleted, known_no_more)
        asked = frozenset(audio_sha256s)
        gone = [key for key in self._shelf.entries if key[0] in asked]
        for key in gone:
            self._shelf.remove(key)
        return Deleted(num_entries=len(gone), busy=[])

    def delete_all(self) -> Deleted:
        """Delete all states, and keep none for a while."""
        self._deleted.clear()
        self._all_deleted = self._clock() + DELETED_SECONDS
        return Deleted(num_entries=self.delete_all_for_now(), busy=[])

    def delete_all_for_now(self) -> int:
        """Delete all states, of which any may be kept again; returns how many."""
        return self._shelf.clear()

    def count_call(self, method: str) -> None:
        """Count an RPC."""
        self._num_calls[method] += 1

    def stats(self, rank: int) -> DecoderStats:
        """Counters and sizes, of the worker of this rank."""
        told = self._shelf.stats()
        return DecoderStats(
            rank=rank,
            states=told.entries,
            bytes=told.bytes,
            max_bytes=told.max_bytes,
            hits=told.hits,
            made=told.misses,
            evictions=told.evictions,
            rpc_calls=dict(self._num_calls),
            worker_id=self._worker_id,
        )

    def _may_keep(self, audio_sha256: str, state: DecoderState) -> bool:
        kept_from = max(self._all_deleted, self._deleted.get(audio_sha256, 0.0))
        return self._shelf.fits(state) and self._clock() >= kept_from
