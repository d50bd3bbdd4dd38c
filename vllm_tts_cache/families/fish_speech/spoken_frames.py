"""What each running request has spoken, so that it can go on after a preemption.

vLLM keeps a preempted request's tokens and computes their KV anew. A position that was
sampled is more than its token: the residual codes of its frame are in its row as well,
and the host forgets those. Here they stay until the request ends: 40 bytes a frame, so
0.6 MB of main memory where a request has spoken 16,384 of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_tts_cache.store.encoding import Array

_FIRST_CAPACITY = 256


class SpokenFrames:
    """The codes of every frame of every live request, by position.

    A frame's codes are made behind `preprocess`, which sees them when it is called for
    that request again. So `will_speak` announces a position, and the next `saw` brings
    what came of it.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Spoken] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def will_speak(self, request_id: str, position: int) -> None:
        """Take note that the codes of this position are made in this step."""
        if (spoken := self._requests.get(request_id)) is None:
            spoken = self._requests[request_id] = _Spoken(first=position)
        spoken.awaited = position

    def saw(self, request_id: str, codes: torch.Tensor | None) -> None:
        """Keep the codes of the position that was announced last, if one was.

        Args:
            request_id: As it was announced.
            codes: ``(1, num_codebooks)``: what the runner has of its last step.
        """
        spoken = self._requests.get(request_id)
        if spoken is None or spoken.awaited is None or codes is None:
            return
        spoken.put(spoken.awaited, codes.reshape(-1).numpy(force=True))
        spoken.awaited = None

    def between(self, request_id: str, begin: int, end: int) -> Array | None:
        """``(end - begin, num_codebooks)``; None if some of it was not seen."""
        spoken = self._requests.get(request_id)
        return None if spoken is None else spoken.between(begin, end)

    def delete(self, request_ids: Iterable[str]) -> None:
        """Delete what requests have spoken that have ended."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)


@dataclass(slots=True)
class _Spoken:
    first: int
    awaited: int | None = None
    num_frames: int = 0
    codes: Array | None = None

    def put(self, position: int, frame: Array) -> None:
        """Keep a frame; what was behind it was spoken in vain."""
        index = position - self.first
        if not 0 <= index <= self.num_frames:  # a gap: what is before it is no use
            self.first, index = position, 0
        if self.codes is None:
            self.codes = np.zeros((_FIRST_CAPACITY, len(frame)), np.int32)
        if index == len(self.codes):
            self.codes = np.concatenate([self.codes, np.zeros_like(self.codes)])
        self.codes[index] = frame
        self.num_frames = index + 1

    def between(self, begin: int, end: int) -> Array | None:
        if self.codes is None or not (
            self.first <= begin <= end <= self.first + self.num_frames
        ):
            return None
        return self.codes[begin - self.first : end - self.first]
