"""The Higgs Audio v2 talker, taking its reference codes by content address."""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from vllm_omni.model_executor.models.higgs_audio_v2 import higgs_audio_v2_talker as host
from vllm_omni.model_executor.models.higgs_audio_v2.higgs_audio_v2_tokenizer import (
    _build_delay_pattern,
)

from vllm_tts_cache.families.higgs_audio_v2.draws import (
    DrawnByRequests,
    Draws,
    SpeakingRow,
)
from vllm_tts_cache.families.higgs_audio_v2.family import FAMILY
from vllm_tts_cache.families.higgs_audio_v2.prompt import NUM_ADDED_ROWS
from vllm_tts_cache.families.higgs_audio_v2.spoken import SpokenStates, State
from vllm_tts_cache.families.networks.higgs_tokenizer.talker import HiggsTalker
from vllm_tts_cache.families.networks.rows import ReferenceRows
from vllm_tts_cache.model_executor.talker import on_device
from vllm_tts_cache.speaker.reference import FIELD

_CODES = "tts_cache_delayed_codes"


class CachedHiggsAudioV2Talker(
    HiggsTalker, host.HiggsAudioV2TalkerForConditionalGeneration
):
    """The host's talker; the rows of a reference are ours, and whose a row is.

    The host puts codes in where a step has all of a reference's placeholders, and
    leaves the voice out of a prefill in chunks. So the rows are put in by position
    here, in any step. What a request has spoken it keeps by rows of the batch, which
    move; so they are moved with their requests here.
    """

    tts_cache_family = FAMILY
    num_added_rows = NUM_ADDED_ROWS
    given = _CODES

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._infos_of_step: Sequence[Mapping[str, Any]] = ()
        self._positions_of_step: torch.Tensor | None = None
        self._spoken = SpokenStates()
        # The host's, by rows of the batch; it makes them where they are not there yet.
        self._audio_state: dict[int, State] = {}
        self._slot_output_len: dict[int, int] = {}
        self._generators: Mapping[int, torch.Generator] = {}
        self._drawing = DrawnByRequests()

    def update_decode_step_metadata(
        self, *, req_ids: Sequence[str] | None = None, **others: Any
    ) -> None:
        """Take in whose the rows of the next step are, and what those have spoken."""
        super().update_decode_step_metadata(req_ids=req_ids, **others)
        self._audio_state = self._spoken.move(self._audio_state, req_ids or ())
        # By these the host would drop the state of a row that got a shorter request.
        self._slot_output_len = dict.fromkeys(self._audio_state, 0)

    def on_requests_finished(self, finished_req_ids: Collection[str]) -> None:
        """Delete what they spoke; the runner calls it before their rows are others'."""
        self._spoken.delete(finished_req_ids)

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
        self._infos_of_step, self._positions_of_step = infos, positions
        return super().forward(
            input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
        )

    def sample(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """Sample as the host does, but for the generators that codes are drawn by."""
        self._generators = sampling_metadata.generators
        self._drawing.draws = None
        if not self._generators:
            return super().sample(logits, sampling_metadata)
        with self._drawing:
            return super().sample(logits, sampling_metadata)

    def audio_codebook_logits(
        self, hidden_states: torch.Tensor, audio_token_mask: torch.Tensor
    ) -> torch.Tensor:
        """Compute them as the host does, and take in whose codes it draws next."""
        rows = audio_token_mask.reshape(-1).nonzero().flatten().tolist()
        speaking = [self._speaking_row(row) for row in rows]
        self._drawing.draws = Draws(speaking, int(self.config.num_codebooks))
        return super().audio_codebook_logits(hidden_states, audio_token_mask)

    def _speaking_row(self, row: int) -> SpeakingRow:
        spoken = self._audio_state.get(row, {}).get("audio_out_ids")
        generator = self._generators.get(row)
        # Behind a chunk that ends in its reference: the runner takes back what it has
        # drawn of an id there, and knows of no codes.
        if row < len(self._infos_of_step) and _is_in_prefill(self._infos_of_step[row]):
            generator = None
        return SpeakingRow(generator, spoken)

    def _maybe_apply_audio_feedback(
        self, hidden_states: torch.Tensor, input_ids: torch.Tensor
    ) -> torch.Tensor:
        """Put in what was spoken last as the host does, then the references' rows.

        In this order: a chunk of one token looks to the host like a step that speaks.
        """
        of_rows = self._audio_state
        self._audio_state = self._by_places(of_rows, len(hidden_states))
        try:
            rows = super()._maybe_apply_audio_feedback(hidden_states, input_ids)
        finally:
            self._audio_state = of_rows
        for index, info in enumerate(self._infos_of_step):
            if _CODES in info and _is_in_prefill(info):
                rows = self._with_reference(rows, index, info)
        return rows

    def _by_places(self, of_rows: dict[int, State], num_rows: int) -> dict[int, State]:
        """The states by the places of their steps among the tokens of all requests.

        The host takes the rows of the batch for these, which they are only where every
        request of a step is given one token.
        """
        starts = self._starts_of_step
        ends = [0, num_rows] if starts is None else starts.tolist()
        return {
            begin: of_rows[row]
            for row, (begin, end) in enumerate(pairwise(ends))
            if row in of_rows and end - begin == 1
        }

    def _with_reference(
        self, rows: torch.Tensor, index: int, info: Mapping[str, Any]
    ) -> torch.Tensor:
        """The rows, with those of a request's reference that the step computes."""
        where, codes = ReferenceRows.from_info(info), info[_CODES]
        span = self._span_of(index, len(rows))
        assert self._positions_of_step is not None
        begin = self._begin_of(index, self._positions_of_step)
        first = max(where.start, begin)
        last = min(where.start + where.num_rows, begin + span.stop - span.start)
        if first >= last:
            return rows  # in the prefix cache, or in another chunk
        part = codes[first - where.start : last - where.start]
        offsets = self.audio_tokens_offsets.to(part.device)
        summed = self.audio_codebook_embeddings(part + offsets).sum(dim=-2)
        at = span.start + first - begin
        rows = rows.clone()
        rows[at : at + len(part)] = summed.to(rows.dtype)
        return rows

    def _span_of(self, index: int, num_rows: int) -> slice:
        starts = self._starts_of_step
        if starts is None:
            return slice(0, num_rows)
        return slice(int(starts[index]), int(starts[index + 1]))

    def _reference(self, rows: ReferenceRows, codes: torch.Tensor) -> dict[str, Any]:
        del rows  # they are with the request already
        delayed = _build_delay_pattern(codes.T).T.contiguous()
        device = self.audio_codebook_embeddings.weight.device
        return {_CODES: on_device(delayed.numpy(), device)}


def _is_in_prefill(info: Mapping[str, Any]) -> bool:
    """Tell it of a request with a reference; the runner says nothing of others."""
    return FIELD in info and not info.get("generated_len")
