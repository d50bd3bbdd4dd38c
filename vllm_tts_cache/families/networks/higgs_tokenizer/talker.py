"""The base of both Higgs Audio talkers, before the host's class.

The host has no ``preprocess`` for them: it adds codes where it computes a step. So
`HiggsTalker` stores a request's reference in the request's info at its first step; the
reference stays there until the request ends.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from vllm_tts_cache.families.networks.higgs_tokenizer import frames
from vllm_tts_cache.families.networks.prompts import ReferenceRows, checked_codes
from vllm_tts_cache.model_executor.talker import SamplingTalker
from vllm_tts_cache.speaker.reference import FIELD


class HiggsTalker(SamplingTalker):
    """Stores references in requests' infos, and lets a request fail alone.

    Attributes:
        num_added_rows: Rows of a reference beyond its frames.
        given: Key that a request's info has once its reference is stored there.
    """

    num_added_rows: ClassVar[int]
    given: ClassVar[str]

    # With these the runner calls `update_decode_step_metadata` before each step.
    supports_omni_decode_step_metadata = True
    supports_omni_query_start_loc = True

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._requests_of_step: list[str] = []
        self._starts_of_step: Tensor | None = None
        self._infos_of_step: Sequence[dict[str, Any]] = ()
        self._positions_of_step: Tensor | None = None

    def update_decode_step_metadata(
        self,
        *,
        req_ids: Sequence[str] | None = None,
        omni_query_start_loc: Tensor | None = None,
        **others: Any,
    ) -> None:
        """Note the requests of the next step and the starts of their spans."""
        self._requests_of_step = list(req_ids or ())
        self._starts_of_step = omni_query_start_loc
        hosts = getattr(super(), "update_decode_step_metadata", None)
        if hosts is not None:
            others["omni_query_start_loc"] = omni_query_start_loc
            hosts(req_ids=None if req_ids is None else list(req_ids), **others)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute a step as the host does, from stored codes.

        A request whose reference cannot be used fails alone, see `_fail`.
        """
        infos = kwargs.get("model_intermediate_buffer") or ()
        self._give_references(infos, positions)
        self._infos_of_step, self._positions_of_step = infos, positions
        if inputs_embeds is None:
            inputs_embeds = self._rows(input_ids, positions)
        host: Any = super()
        step = input_ids, positions, intermediate_tensors, inputs_embeds
        rows: Tensor = host.forward(*step, **kwargs)
        return rows

    def _rows(self, input_ids: Tensor, positions: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return a step's rows if the host would make wrong ones, else None."""
        return None

    @abstractmethod
    def _reference(self, rows: ReferenceRows, codes: Tensor) -> dict[str, Any]:
        """Return what is stored in a request's info, with `given` among the keys.

        ``codes`` are ``(num_frames, num_codebooks)`` int64, on the CPU.
        """

    def _give_references(
        self, infos: Sequence[dict[str, Any]], positions: Tensor
    ) -> None:
        """Store the reference of each request that begins; each may fail alone."""
        requests = zip(self._requests_of_step, infos, strict=False)
        for row, (request_id, info) in enumerate(requests):
            if FIELD not in info or self.given in info:
                continue
            named = {**info, "request_id": request_id}
            if self._has_failed(named):
                continue
            try:
                info.update(self._given_to(named, self._begin_of(row, positions)))
            except Exception as exc:  # noqa: BLE001  raising here would end the engine
                self._fail(named, exc)

    def _given_to(self, info: Mapping[str, Any], begin: int) -> dict[str, Any]:
        """Build `_reference` for a request. Raises: TTSCacheError, ValueError."""
        ref = self._speaker(info)
        rows = ReferenceRows.from_info(info)
        if begin > rows.start:  # rows before `begin` are in the prefix cache
            self._refuse_suspect(rows.prefix(ref), info)
        try:
            expected = rows.num_rows - self.num_added_rows, frames.NUM_CODEBOOKS
            codes = self._only_encoding(ref)["codes"]
            codes = checked_codes(codes, expected, frames.CODEBOOK_SIZE)
            given = self._reference(rows, torch.tensor(codes, dtype=torch.long))
        except Exception:
            self._suspect(rows.prefix(ref))
            raise
        if begin <= rows.start:
            self._suspect_prefixes.clear(rows.prefix(ref))
        self._count_prompt()
        return given

    def _begin_of(self, row: int, positions: Tensor) -> int:
        """Return the first position of a request's span in this step."""
        starts = self._starts_of_step
        return int(positions[0 if starts is None else int(starts[row])])
