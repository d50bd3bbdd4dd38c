"""The Audio8 TTS slow AR, taking its reference codes by content address."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm_omni.model_executor.models.audio8_tts import audio8_tts_slow_ar as host

from vllm_tts_cache.families.audio8_tts.family import FAMILY
from vllm_tts_cache.families.networks.dac.talker import SlowAR
from vllm_tts_cache.model_executor.talker import Built, SamplingTalker, failing_alone

# The host's key of a clone whose waveform it encodes itself; our adapter sends none.
_HOSTS_OWN_CLONE = "audio8_structured_voice_clone"


class CachedAudio8SlowAR(
    SlowAR, SamplingTalker, host.Audio8TTSSlowARForConditionalGeneration
):
    """The host's slow AR with prefill rows from stored codes.

    The host keeps a prompt's rows in pinned memory, which needs a GPU.
    """

    tts_cache_family = FAMILY

    @failing_alone
    def preprocess(self, input_ids: Tensor, input_embeds: Any, **info: Any) -> Built:
        """Build a span of a prefill; the host builds the rows of decode steps."""
        # The span's length does not tell: the last chunk of a prefill may be one token.
        is_prefill = info.get("_omni_is_prefill", input_ids.shape[0] > 1)
        if not is_prefill or info.get(_HOSTS_OWN_CLONE):
            return super().preprocess(input_ids, input_embeds, **info)
        rows = self.embed_input_ids(input_ids).to(torch.bfloat16)
        self._add_codes(rows, info)
        padding = torch.full_like(input_ids, self._pad_token_id)
        return padding, rows, {"codes": {"audio": self._no_frames(input_ids)}}

    def _passed_over(self, input_ids: Tensor, info: Mapping[str, Any]) -> Built:
        """As `SlowAR`, with the padding ids that the host returns for a prefill."""
        _, rows, update = super()._passed_over(input_ids, info)
        return torch.full_like(input_ids, self._pad_token_id), rows, update

    def _add_sums(self, span: Tensor, sums: Tensor) -> None:
        span += sums
