"""The codes that each running request has spoken, to resume after a preemption.

vLLM keeps a preempted request's tokens and computes their KV again. But the row of a
sampled position holds the residual codes of its frame as well as its token, and the
host drops these codes. `SpokenFrames` keeps them until the request ends: 40 bytes a
frame, so 0.6 MB of main memory for a request that has spoken 16,384 frames.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_tts_cache.store.encoding import Array

_FIRST_CAPACITY = 256


class SpokenFrames:
    """The codes of every frame of every live request, by position.

    The host makes a frame's codes after `preprocess`, which gets them in the request's
    next step. So `will_speak` announces a position, and the next `saw` has its codes.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Spoken] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def will_speak(self, request_id: str, position: int) -> None:
        """Note that the host makes the codes of this position in this step."""
        if (spoken := self._requests.get(request_id)) is None:
            spoken = self._requests[request_id] = _Spoken(first=position)
        spoken.awaited = position

    def saw(self, request_id: str, codes: torch.Tensor | None) -> None:
        """Keep the codes of the position that was announced last, if one was.

        ``codes`` are ``(1, num_codebooks)`` of the request's last step; None without
        one.
        """
        spoken = self._requests.get(request_id)
        if spoken is None or spoken.awaited is None or codes is None:
            return
        spoken.put(spoken.awaited, codes.reshape(-1).numpy(force=True))
        spoken.awaited = None

    def between(self, request_id: str, begin: int, end: int) -> Array | None:
        """Return ``(end - begin, num_codebooks)``; None if a frame is missing."""
        spoken = self._requests.get(request_id)
        return None if spoken is None else spoken.between(begin, end)

    def delete(self, request_ids: Iterable[str]) -> None:
        """Delete the codes of requests that have ended."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)


@dataclass(slots=True)
class _Spoken:
    first: int
    awaited: int | None = None
    num_frames: int = 0
    codes: Array | None = None

    def put(self, position: int, frame: Array) -> None:
        """Keep a frame; drop frames after it, which the host speaks once more."""
        index = position - self.first
        if not 0 <= index <= self.num_frames:  # a gap: earlier frames cannot be used
            self.first, index = position, 0
        if self.codes is None:
            self.codes = np.zeros((_FIRST_CAPACITY, len(frame)), np.int32)
        if index == len(self.codes):
            self.codes = np.concatenate([self.codes, np.zeros_like(self.codes)])
        self.codes[index] = frame
        self.num_frames = index + 1

    def between(self, begin: int, end: int) -> Array | None:
        last = self.first + self.num_frames
        if self.codes is None or not self.first <= begin <= end <= last:
            return None
        return self.codes[begin - self.first : end - self.first]
