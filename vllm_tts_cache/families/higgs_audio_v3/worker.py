"""The Higgs Audio v3 talker, taking its reference codes by content address."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm_omni.model_executor.models.higgs_audio_v3 import higgs_audio_v3_talker as host
from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_tokenizer import (
    apply_delay_pattern,
)

from vllm_tts_cache.families.higgs_audio_v3.family import FAMILY
from vllm_tts_cache.families.higgs_audio_v3.prompt import NUM_ADDED_ROWS
from vllm_tts_cache.families.networks.higgs_tokenizer.talker import HiggsTalker
from vllm_tts_cache.families.networks.rows import ReferenceRows
from vllm_tts_cache.model_executor.talker import on_device

# Where the host looks for delayed codes, and for the positions that they stand at.
_CODES, _POSITIONS = "audio_input_ids", "audio_placeholder_positions"


class CachedHiggsAudioV3Talker(
    HiggsTalker, host.HiggsAudioV3TalkerForConditionalGeneration
):
    """The host's talker; only where a reference's codes come from is ours.

    The host puts them in by position, in whichever step computes that position.
    """

    tts_cache_family = FAMILY
    num_added_rows = NUM_ADDED_ROWS
    given = _CODES

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # The host makes one of vLLM's where there is none.
        self._stock_sampler = DetachedSampler()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute a step as the host does, from codes that are stored.

        Never raises for a request that names a speaker: it fails alone instead.
        """
        infos = kwargs.get("model_intermediate_buffer") or ()
        self._give_references(infos, positions)
        if inputs_embeds is None and self._has_lone_row_of_a_reference(
            input_ids, infos
        ):
            inputs_embeds = self._rows(input_ids, positions, infos)
        return super().forward(
            input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
        )

    def postprocess(self, *states: Any, **infos: Any) -> dict[str, Any]:
        """Return what a request has just spoken, in memory of its own.

        The host returns a view of what the next step writes into, and sends it when
        that is done: without a prefix cache the codes of another frame, and where rows
        have moved, of another request.
        """
        spoken: dict[str, Any] = super().postprocess(*states, **infos)
        if not spoken:
            return spoken
        return {"codes": {"audio": spoken["codes"]["audio"].clone()}}

    def _reference(self, rows: ReferenceRows, codes: torch.Tensor) -> dict[str, Any]:
        places = np.arange(rows.start, rows.start + rows.num_rows)
        device = self.multimodal_embedding.weight.device
        return {
            _CODES: on_device(apply_delay_pattern(codes).numpy(), device),
            _POSITIONS: on_device(places, device),
        }

    def _has_lone_row_of_a_reference(
        self, input_ids: torch.Tensor, infos: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Tell whether the host might take a chunk of one token for a decode step.

        It puts codes in only where some span is longer.
        """
        return self._is_single_token_decode_step(len(input_ids)) and any(
            _CODES in info and not info.get("generated_len") for info in infos
        )

    def _rows(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        infos: Sequence[dict[str, Any]],
    ) -> torch.Tensor:
        rows = self.model.embed_tokens(input_ids)
        rows = self._apply_ref_audio_substitution(
            rows, input_ids, positions, list(infos)
        )
        return self._apply_audio_feedback(rows, input_ids)


class DetachedSampler(Sampler):
    """Draws text ids without using up the requests' own generators.

    Once a request speaks there is nothing to draw: its id is ``<|audio|>``. The host
    passes over it in steps in which every row speaks, and in no other. Codes are drawn
    from the same generators, so without this it would be heard who comes and goes.
    """

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        *others: Any,
        **named: Any,
    ) -> Any:
        """Sample as vLLM does."""
        generators = {
            row: generator.clone_state()
            for row, generator in sampling_metadata.generators.items()
        }
        detached = replace(sampling_metadata, generators=generators)
        return super().forward(logits, detached, *others, **named)
