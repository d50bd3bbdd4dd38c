"""Stores states of a codec decoder that depend on the voice alone."""

import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from vllm_tts_cache.speaker.wire import DecoderStats, Deleted
from vllm_tts_cache.store.cache import Budget, LruSegment

# A request with a prompt may reach the decoder after its voice was deleted, so no state
# of that voice is stored for this long; later the voice may be registered again.
DELETED_SECONDS = 600.0
# With more deleted voices than this, no state of any voice is stored.
_MAX_DELETED = 4096


@dataclass(frozen=True, slots=True)
class DecoderState:
    """A state, which requests share and do not write into, and its tensors' size."""

    value: Any
    num_bytes: int


class DecoderStates:
    """An LRU cache of states by audio and input; for the thread of one stage.

    Attributes:
        num_calls: How often each method of the RPC was called.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._states = LruSegment[tuple[str, str], DecoderState](Budget(max_bytes))
        # Clock times until which no state of a voice, or of any voice, is stored.
        self._deleted: OrderedDict[str, float] = OrderedDict()
        self._all_deleted = 0.0
        self._worker_id = uuid.uuid4().hex
        self.num_calls: Counter[str] = Counter()

    def get(
        self, audio_sha256: str | None, digest: str, make: Callable[[], DecoderState]
    ) -> Any:
        """Return a state, made if it is not stored.

        Args:
            audio_sha256: Of the registered voice; None if no state is to be stored.
            digest: Hash of the input of `make`.
            make: Computes the state.
        """
        key = (audio_sha256 or "", digest)
        if (state := self._states.entries.get(key)) is not None:
            self._states.entries.move_to_end(key)
            self._states.hits += 1
            return state.value
        state = make()
        self._states.misses += 1
        if audio_sha256 is not None:
            deleted_until = self._deleted.get(audio_sha256, 0.0)
            if self._clock() >= max(self._all_deleted, deleted_until):
                self._states.add(key, state)
        return state.value

    def delete(self, audio_sha256s: Collection[str]) -> Deleted:
        """Delete the states of these audios, and store none for `DELETED_SECONDS`."""
        until = self._clock() + DELETED_SECONDS
        for sha in audio_sha256s:
            self._deleted[sha] = until
            self._deleted.move_to_end(sha)
        while len(self._deleted) > _MAX_DELETED:
            _, forgotten_until = self._deleted.popitem(last=False)
            self._all_deleted = max(self._all_deleted, forgotten_until)
        asked = frozenset(audio_sha256s)
        deleted = [key for key in self._states.entries if key[0] in asked]
        for key in deleted:
            self._states.remove(key)
        return Deleted(num_entries=len(deleted), busy=[])

    def delete_all(self) -> Deleted:
        """Delete all states, and store none for `DELETED_SECONDS`."""
        self._deleted.clear()
        self._all_deleted = self._clock() + DELETED_SECONDS
        return Deleted(num_entries=self.delete_all_for_now(), busy=[])

    def delete_all_for_now(self) -> int:
        """Delete all states, and return their number; later ones are stored."""
        return self._states.clear()

    def stats(self, rank: int) -> DecoderStats:
        """Return counters and sizes, under the rank of this worker."""
        stats = self._states.stats()
        return DecoderStats(
            rank=rank,
            states=stats.entries,
            bytes=stats.bytes,
            max_bytes=stats.max_bytes,
            hits=stats.hits,
            made=stats.misses,
            evictions=stats.evictions,
            rpc_calls=dict(self.num_calls),
            worker_id=self._worker_id,
        )
