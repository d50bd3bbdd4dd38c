"""The Higgs Audio v3 talker, taking its reference codes by content address."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm_omni.model_executor.models.higgs_audio_v3 import (
    higgs_audio_v3_talker as host,
)
from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_tokenizer import (
    apply_delay_pattern,
)

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.higgs_audio_v3.family import CODEC, FAMILY
from vllm_tts_cache.families.higgs_audio_v3.prompt import ReferenceRows
from vllm_tts_cache.model_executor.talker import CachedTalker, on_device
from vllm_tts_cache.speaker.ref import FIELD, SpeakerRef
from vllm_tts_cache.store.encoding import Array

# Where the host looks for delayed codes, and for the positions that they stand at.
_CODES, _POSITIONS = "audio_input_ids", "audio_placeholder_positions"


class CachedHiggsAudioV3Talker(
    CachedTalker, host.HiggsAudioV3TalkerForConditionalGeneration
):
    """The host's talker; only where a reference's codes come from is ours.

    The host has no ``preprocess`` here: it puts the codes in by position, in whichever
    step computes that position. So what a request needs is given to it as its first
    step begins, and stays with it until the request ends.
    """

    tts_cache_family = FAMILY

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._requests_of_step: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the talker, then our own encoder: no request pays for it."""
        loaded = super().load_weights(weights)
        self._load_speakers(self.vllm_config)
        return loaded

    def update_decode_step_metadata(
        self, *, req_ids: Sequence[str] | None = None, **others: Any
    ) -> None:
        """Take in whose the spans of the next step are; the runner calls it."""
        self._requests_of_step = list(req_ids or ())
        ids = None if req_ids is None else self._requests_of_step
        super().update_decode_step_metadata(req_ids=ids, **others)

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

    def compute_logits(
        self, hidden_states: Any, sampling_metadata: Any = None
    ) -> torch.Tensor | None:
        """As the host; it samples by itself, so `sample` ends what failed."""
        self._suspect_prefixes.end_step()  # all of its prefills were built
        hosts: Any = super(CachedTalker, self)
        return hosts.compute_logits(hidden_states, sampling_metadata)

    def sample(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """Sample as the host does, but for the id that ends a failed request."""
        output = super().sample(logits, sampling_metadata)
        self._failed_requests.force(output.sampled_token_ids, self._requests_of_rows)
        return output

    def _give_references(
        self, infos: Sequence[dict[str, Any]], positions: torch.Tensor
    ) -> None:
        """Give each request that begins what the host reads of it."""
        for row, (request_id, info) in enumerate(
            zip(self._requests_of_step, infos, strict=False)
        ):
            if FIELD not in info or _CODES in info:
                continue
            named = {**info, "request_id": request_id}
            if self._has_failed(named):
                continue
            try:
                info.update(self._reference(named, self._begin_of(row, positions)))
            except Exception as exc:  # noqa: BLE001  raising here would end the engine
                self._fail(named, exc)

    def _reference(self, info: Mapping[str, Any], begin: int) -> dict[str, Any]:
        """Return delayed codes and where they stand, in the host's form.

        Raises: TTSCacheError, ValueError: they cannot be had, or are not such.
        """
        if (ref := SpeakerRef.from_info(info)) is None:
            raise TTSCacheError("it names nobody")
        rows = ReferenceRows.from_info(info)
        if begin > rows.start:  # the rest is in the prefix cache
            self._refuse_suspect(ref.audio_sha256, info)
        try:
            codes = self._codes(ref, rows.num_rows)
        except Exception:
            self._suspect(ref.audio_sha256)
            raise
        if begin <= rows.start:
            self._suspect_prefixes.clear(ref.audio_sha256)
        self._count_prompt()
        delayed = apply_delay_pattern(torch.tensor(codes, dtype=torch.long)).numpy()
        places = np.arange(rows.start, rows.start + rows.num_rows)
        device = self.multimodal_embedding.weight.device
        return {
            _CODES: on_device(delayed, device),
            _POSITIONS: on_device(places, device),
        }

    def _codes(self, ref: SpeakerRef, num_rows: int) -> Array:
        """``(num_frames, num_codebooks)``, not delayed, each inside its codebook.

        Raises: TTSCacheError, ValueError: they cannot be had, or are not such.
        """
        codes = self._encodings(ref, (CODEC,))[CODEC]["codes"]
        expected = (num_rows - self.num_codebooks + 1, self.num_codebooks)
        if codes.shape != expected:
            raise TTSCacheError(
                f"its codes are {codes.shape}, and its prompt was made for {expected}"
            )
        if codes.min() < 0 or codes.max() >= host.BOC_ID:
            # On a GPU an index out of range would end the process.
            raise TTSCacheError("a code of it is outside of its codebook")
        return codes

    def _begin_of(self, row: int, positions: torch.Tensor) -> int:
        """The position that the request's span of this step begins with."""
        starts = self._last_step_query_start_loc
        at = 0 if starts is None else int(starts[row])
        return int(positions[at])

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
