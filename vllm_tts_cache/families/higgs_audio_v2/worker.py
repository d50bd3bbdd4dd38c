"""The Higgs Audio v2 talker, taking its reference codes by content address."""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm_omni.model_executor.models.higgs_audio_v2 import higgs_audio_v2_talker as host
from vllm_omni.model_executor.models.higgs_audio_v2.higgs_audio_v2_tokenizer import (
    _build_delay_pattern,
)

from vllm_tts_cache.families.higgs_audio_v2 import draws
from vllm_tts_cache.families.higgs_audio_v2.family import FAMILY
from vllm_tts_cache.families.higgs_audio_v2.prompt import NUM_ADDED_ROWS
from vllm_tts_cache.families.networks.higgs_tokenizer.talker import HiggsTalker
from vllm_tts_cache.families.networks.prompts import ReferenceRows
from vllm_tts_cache.model_executor.talker import on_device
from vllm_tts_cache.speaker.reference import FIELD

_CODES = "tts_cache_delayed_codes"

# The host's state of one request: its frames, and the progress of their delays.
State = dict[str, Any]


class SpokenStates:
    """Keeps spoken frames by request; the host keeps them by row of the batch.

    When a request ends, the last request moves into its row. The host notices a move
    only by the row's number of ids, and mostly does not: the moved request then
    continues the frames of the one that ended.
    """

    def __init__(self) -> None:
        self._of_requests: dict[str, State] = {}
        self._requests_of_rows: list[str | None] = []

    def move(
        self, of_rows: dict[int, State], request_ids: Sequence[str]
    ) -> dict[int, State]:
        """Return the states by the rows of the step that begins.

        ``of_rows`` has those that the last step left, by its rows; ``request_ids`` are
        the requests of the rows now.
        """
        for row, request_id in enumerate(self._requests_of_rows):
            if request_id is not None and row in of_rows:
                self._of_requests[request_id] = of_rows[row]
        self._requests_of_rows = list(request_ids)
        return {
            row: self._of_requests[request_id]
            for row, request_id in enumerate(request_ids)
            if request_id in self._of_requests
        }

    def delete(self, request_ids: Collection[str]) -> None:
        """Delete the states of requests that have ended."""
        for request_id in request_ids:
            self._of_requests.pop(request_id, None)
        self._requests_of_rows = [
            None if request_id in request_ids else request_id
            for request_id in self._requests_of_rows
        ]


class CachedHiggsAudioV2Talker(
    HiggsTalker, host.HiggsAudioV2TalkerForConditionalGeneration
):
    """The host's talker, with our rows of a reference and our states by request.

    The host adds a reference's codes only in a step with all of its placeholders, and
    so leaves the voice out of a prefill in chunks. Here the rows are added by position,
    in any step. The host keeps what was spoken by row of the batch, though requests
    change rows; here it moves with its request.
    """

    tts_cache_family = FAMILY
    num_added_rows = NUM_ADDED_ROWS
    given = _CODES

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._spoken = SpokenStates()
        # The host's fields, by row of the batch; it makes them if they are missing.
        self._audio_state: dict[int, State] = {}
        self._slot_output_len: dict[int, int] = {}
        self._generators: Mapping[int, torch.Generator] = {}
        self._drawing = draws.DrawnByRequests()

    def update_decode_step_metadata(
        self, *, req_ids: Sequence[str] | None = None, **others: Any
    ) -> None:
        """Note the requests of the next step's rows, and move their states there."""
        super().update_decode_step_metadata(req_ids=req_ids, **others)
        self._audio_state = self._spoken.move(self._audio_state, req_ids or ())
        # With zeros the host keeps the state of a row that got a shorter request.
        self._slot_output_len = dict.fromkeys(self._audio_state, 0)

    def on_requests_finished(self, finished_req_ids: Collection[str]) -> None:
        """Delete spoken frames; the runner calls this before it reuses the rows."""
        self._spoken.delete(finished_req_ids)

    def sample(self, logits: Tensor, sampling_metadata: Any) -> Any:
        """Sample as the host does, but draw codes by the requests' generators."""
        self._generators = sampling_metadata.generators
        self._drawing.draws = None
        if not self._generators:
            return super().sample(logits, sampling_metadata)
        with self._drawing:
            return super().sample(logits, sampling_metadata)

    def audio_codebook_logits(
        self, hidden_states: Tensor, audio_token_mask: Tensor
    ) -> Tensor:
        """Compute logits as the host does, and note the rows that draw codes next."""
        rows = audio_token_mask.reshape(-1).nonzero().flatten().tolist()
        speaking = [self._speaking_row(row) for row in rows]
        self._drawing.draws = draws.Draws(speaking, int(self.config.num_codebooks))
        return super().audio_codebook_logits(hidden_states, audio_token_mask)

    def _speaking_row(self, row: int) -> draws.SpeakingRow:
        spoken = self._audio_state.get(row, {}).get("audio_out_ids")
        generator = self._generators.get(row)
        # A chunk may end in the reference. There the runner undoes the draw of an id,
        # but not of codes, which so must not use the request's generator.
        if row < len(self._infos_of_step) and _is_in_prefill(self._infos_of_step[row]):
            generator = None
        return draws.SpeakingRow(generator, spoken)

    def _maybe_apply_audio_feedback(
        self, hidden_states: Tensor, input_ids: Tensor
    ) -> Tensor:
        """Add the last spoken frames as the host does, then the references' rows.

        References come last, as the host takes a chunk of one token for a decode step.
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
        """Return the states by the index of their token among those of all requests.

        The host uses rows of the batch for these indices, which is right only if every
        request of the step has one token.
        """
        starts = self._starts_of_step
        ends = [0, num_rows] if starts is None else starts.tolist()
        return {
            begin: of_rows[row]
            for row, (begin, end) in enumerate(pairwise(ends))
            if row in of_rows and end - begin == 1
        }

    def _with_reference(
        self, rows: Tensor, index: int, info: Mapping[str, Any]
    ) -> Tensor:
        """Return the rows with those of a request's reference that are in this step."""
        where, codes = ReferenceRows.from_info(info), info[_CODES]
        starts = self._starts_of_step
        ends = [0, len(rows)] if starts is None else starts.tolist()
        start, end = ends[index : index + 2]
        assert self._positions_of_step is not None
        begin = self._begin_of(index, self._positions_of_step)
        first = max(where.start, begin)
        last = min(where.start + where.num_rows, begin + end - start)
        if first >= last:
            return rows  # in the prefix cache, or in another chunk
        part = codes[first - where.start : last - where.start]
        offsets = self.audio_tokens_offsets.to(part.device)
        summed = self.audio_codebook_embeddings(part + offsets).sum(dim=-2)
        at = start + first - begin
        rows = rows.clone()
        rows[at : at + len(part)] = summed.to(rows.dtype)
        return rows

    def _reference(self, rows: ReferenceRows, codes: Tensor) -> dict[str, Any]:
        del rows  # the request's info has them already
        delayed = _build_delay_pattern(codes.T).T.contiguous()
        device = self.audio_codebook_embeddings.weight.device
        return {_CODES: on_device(delayed.numpy(), device)}


def _is_in_prefill(info: Mapping[str, Any]) -> bool:
    """Tell whether a request with a reference is in its prefill; False for others."""
    return FIELD in info and not info.get("generated_len")
