"""What a decoder computes of voices and not of requests, kept for later requests."""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

# A request that has its prompt may reach the decoder after its voice was deleted: of so
# many voices, or for so long where nobody knows which they were, nothing is kept.
_MAX_FORGOTTEN = 4096
_FORGETFUL_SECONDS = 60.0


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
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], DecoderState] = OrderedDict()
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._keeps_from = 0.0
        self._worker_id = uuid.uuid4().hex
        self._num_bytes = self._num_hits = self._num_made = self._num_evicted = 0

    def get(
        self, audio_sha256: str | None, digest: str, make: Callable[[], DecoderState]
    ) -> Any:
        """Return a state, made if it is not there.

        Args:
            audio_sha256: Of a registered voice; None for one whose state is not kept.
            digest: Of what it is computed from.
            make: Computes it.
        """
        if audio_sha256 is None:
            self._num_made += 1
            return make().value
        key = (audio_sha256, digest)
        if (state := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            self._num_hits += 1
            return state.value
        state = make()
        self._num_made += 1
        if audio_sha256 not in self._forgotten and self._clock() >= self._keeps_from:
            self._keep(key, state)
        return state.value

    def forget(self, audio_sha256s: Collection[str]) -> int:
        """Drop states, and keep none of these voices; returns how many there were."""
        for sha in audio_sha256s:
            self._forgotten[sha] = None
            self._forgotten.move_to_end(sha)
        while len(self._forgotten) > _MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)
        gone = [key for key in self._kept if key[0] in self._forgotten]
        for key in gone:
            self._num_bytes -= self._kept.pop(key).num_bytes
        return len(gone)

    def forget_all(self) -> int:
        """Drop all states, and keep none for a minute; returns how many there were."""
        self._keeps_from = self._clock() + _FORGETFUL_SECONDS
        num_states = len(self._kept)
        self._kept.clear()
        self._num_bytes = 0
        return num_states

    def stats(self) -> dict[str, Any]:
        """The fields of `wire.DecoderStats`, but for the rank."""
        return {
            "states": len(self._kept),
            "bytes": self._num_bytes,
            "max_bytes": self._max_bytes,
            "hits": self._num_hits,
            "made": self._num_made,
            "evictions": self._num_evicted,
            "worker_id": self._worker_id,
        }

    def _keep(self, key: tuple[str, str], state: DecoderState) -> None:
        if state.num_bytes > self._max_bytes:
            return
        self._kept[key] = state
        self._num_bytes += state.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
            self._num_evicted += 1
