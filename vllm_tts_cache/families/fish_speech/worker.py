"""The Fish Speech slow AR, taking its reference codes by content address."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm_omni.model_executor.models.fish_speech import fish_speech_slow_ar as host

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.fish_speech.family import FAMILY
from vllm_tts_cache.families.networks.dac.talker import SlowAR, begin_of
from vllm_tts_cache.model_executor.failed_requests import request_id_of
from vllm_tts_cache.model_executor.talker import Built, failing_alone
from vllm_tts_cache.store.encoding import Array

# The host's key of a clone whose waveform it encodes itself; our adapter sends none.
_HOSTS_OWN_CLONE = "fish_structured_voice_clone"
_FIRST_CAPACITY = 256  # frames


class CachedFishSpeechSlowAR(SlowAR, host.FishSpeechSlowARForConditionalGeneration):
    """The host's slow AR with prefill rows from stored codes.

    It keeps the codes that a request speaks, to build their rows after a preemption.
    """

    tts_cache_family = FAMILY

    # With prefix caching on, the host keeps outputs per token beside the KV, to return
    # a whole prompt's after a hit. The hidden states are read at the last token only,
    # which no hit covers, so the host need not copy them to the CPU in every step ...
    requires_full_prefix_cached_hidden_states = False
    # ... nor send them to stage 1, which reads only codes.
    omni_pooler_payload_include_hidden = False
    # The host reads codes only after a hit, so it may copy them at the request's end.
    deferred_prefix_cache_mm_keys = frozenset({"audio_codes"})

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._spoken = SpokenFrames()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load as every talker, but keep the host from loading an encoder beside ours.

        It would take 800 MB, and only the tensors whose names the host knows would be
        loaded. A request whose waveform the host encodes itself loads it then.
        """
        load = host._load_dac_codec
        host._load_dac_codec = lambda *_, **__: None
        try:
            return super().load_weights(weights)
        finally:
            host._load_dac_codec = load

    @failing_alone
    def preprocess(self, input_ids: Tensor, input_embeds: Any, **info: Any) -> Built:
        """Build a span of a prefill; the host builds the rows of decode steps."""
        self._spoken.saw(request_id_of(info), (info.get("codes") or {}).get("audio"))
        # The span's length alone does not tell: the last chunk of a prefill may be one
        # token, and the frames spoken before a preemption come as several.
        is_prefill = info.get("_omni_is_prefill", input_ids.shape[0] > 1)
        if not is_prefill and input_ids.shape[0] == 1:
            self._spoken.will_speak(request_id_of(info), begin_of(info))
            return super().preprocess(input_ids, input_embeds, **info)
        if info.get(_HOSTS_OWN_CLONE):
            return super().preprocess(input_ids, input_embeds, **info)
        rows = self.embed_input_ids(input_ids).to(torch.bfloat16)
        self._add_spoken(rows, input_ids, info)
        self._add_codes(rows, info)
        return input_ids, rows, {"codes": {"audio": self._no_frames(input_ids)}}

    def _no_frames(self, input_ids: Tensor) -> Tensor:
        # The host keeps the codes of each step on the CPU.
        return torch.zeros((len(input_ids), self._num_codebooks), dtype=torch.long)

    def on_requests_finished(self, request_ids: Iterable[str]) -> None:
        """Delete what these requests spoke; the runner calls this."""
        self._spoken.delete(request_ids)

    def _add_sums(self, span: Tensor, sums: Tensor) -> None:
        span.add_(sums).div_(math.sqrt(self._num_codebooks + 1))

    def _add_spoken(self, rows: Tensor, ids: Tensor, info: Mapping[str, Any]) -> None:
        """Add the codes of spoken frames to rows after the prompt, as decoding did.

        Raises: TTSCacheError.
        """
        begin = begin_of(info)
        end = begin + len(rows)
        first = max(begin, int(info.get("_omni_prompt_len", end)))
        if first >= end:
            return
        codes = self._spoken.between(request_id_of(info), first, end)
        if codes is None:
            raise TTSCacheError("what it had spoken when it was preempted is lost")
        ids, span = ids[first - begin :], rows[first - begin :]
        # The row of an id that is no frame stays, as in the host.
        summed = self._codebook_sums(codes.clip(0, self._codebook_size - 1))
        frames = (span + summed.to(span.dtype)) / math.sqrt(self._num_codebooks + 1)
        is_frame = (ids >= self._semantic_begin_id) & (ids <= self._semantic_end_id)
        span.copy_(torch.where(is_frame.unsqueeze(-1), frames, span))

    def _count_if_complete(self, rows: Tensor, info: Mapping[str, Any]) -> None:
        if request_id_of(info) not in self._spoken:  # else it was counted before
            super()._count_if_complete(rows, info)


class SpokenFrames:
    """The codes of every frame of every live request, by position.

    vLLM keeps a preempted request's tokens and computes their KV again. But the row of
    a sampled position holds the residual codes of its frame as well as its token, and
    the host drops these codes. They take 40 bytes a frame, so 0.6 MB of main memory for
    a request that has spoken 16,384 frames.

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

    def saw(self, request_id: str, codes: Tensor | None) -> None:
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
