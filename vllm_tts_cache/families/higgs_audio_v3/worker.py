"""The Higgs Audio v3 talker, taking its reference codes by content address."""

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm_omni.model_executor.models.higgs_audio_v3 import higgs_audio_v3_talker as host
from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_tokenizer import (
    apply_delay_pattern,
)

from vllm_tts_cache.families.higgs_audio_v3.family import FAMILY
from vllm_tts_cache.families.higgs_audio_v3.prompt import NUM_ADDED_ROWS
from vllm_tts_cache.families.networks.higgs_tokenizer.talker import HiggsTalker
from vllm_tts_cache.families.networks.prompts import ReferenceRows
from vllm_tts_cache.model_executor.talker import on_device

# Where the host looks for delayed codes, and for the positions that they stand at.
_CODES, _POSITIONS = "audio_input_ids", "audio_placeholder_positions"


class CachedHiggsAudioV3Talker(
    HiggsTalker, host.HiggsAudioV3TalkerForConditionalGeneration
):
    """The host's talker with a reference's codes from stored encodings.

    The host adds the codes by position, in the step that computes the position.
    """

    tts_cache_family = FAMILY
    num_added_rows = NUM_ADDED_ROWS
    given = _CODES

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # The host makes a sampler of vLLM if this one is missing.
        self._stock_sampler = DetachedSampler()

    def postprocess(self, *states: Any, **infos: Any) -> dict[str, Any]:
        """Return a copy of the frame that a request has just spoken.

        The host returns a view of a buffer, and sends it after the next step has
        written there: without a prefix cache it sends the codes of another frame, and
        if rows have moved, of another request.
        """
        spoken: dict[str, Any] = super().postprocess(*states, **infos)
        if not spoken:
            return spoken
        return {"codes": {"audio": spoken["codes"]["audio"].clone()}}

    def _reference(self, rows: ReferenceRows, codes: Tensor) -> dict[str, Any]:
        places = np.arange(rows.start, rows.start + rows.num_rows)
        device = self.multimodal_embedding.weight.device
        return {
            _CODES: on_device(apply_delay_pattern(codes).numpy(), device),
            _POSITIONS: on_device(places, device),
        }

    def _rows(self, input_ids: Tensor, positions: Tensor) -> Tensor | None:
        """Build the rows where the host might take a chunk of one token for decoding.

        The host adds a reference's codes only in a step with a longer span.
        """
        infos = list(self._infos_of_step)
        has_lone_row = any(_CODES in i and not i.get("generated_len") for i in infos)
        if not has_lone_row or not self._is_single_token_decode_step(len(input_ids)):
            return None
        rows = self.model.embed_tokens(input_ids)
        rows = self._apply_ref_audio_substitution(rows, input_ids, positions, infos)
        return self._apply_audio_feedback(rows, input_ids)


class DetachedSampler(Sampler):
    """Draws text ids without using up the requests' own generators.

    The id of a request that speaks is always ``<|audio|>``. The host skips its draw in
    no steps but those in which every row speaks. Codes are drawn by the same
    generators, so they would depend on when other requests begin and end.
    """

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        *others: Any,
        **named: Any,
    ) -> Any:
        """Sample as vLLM does."""
        given = sampling_metadata.generators.items()
        generators = {row: generator.clone_state() for row, generator in given}
        detached = replace(sampling_metadata, generators=generators)
        return super().forward(logits, detached, *others, **named)
