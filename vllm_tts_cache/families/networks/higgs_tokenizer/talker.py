"""What the workers of both Higgs Audio models share; mixed in before the host's.

The host has no ``preprocess`` for them: it puts codes in where it computes a step. So
what a request needs is given to it as its first step begins, and stays with it until
the request ends.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from vllm_tts_cache.families.networks.higgs_tokenizer.encoder import CODEC
from vllm_tts_cache.families.networks.higgs_tokenizer.frames import (
    CODEBOOK_SIZE,
    NUM_CODEBOOKS,
)
from vllm_tts_cache.families.networks.rows import ReferenceRows, checked_codes
from vllm_tts_cache.model_executor.talker import SamplingTalker
from vllm_tts_cache.speaker.reference import FIELD, SpeakerRef
from vllm_tts_cache.store.encoding import Array


class HiggsTalker(SamplingTalker):
    """Gives requests their references, and lets one fail alone.

    Attributes:
        num_added_rows: Rows of a reference beyond its frames.
        given: The name under which a request has what it was given.
    """

    num_added_rows: ClassVar[int]
    given: ClassVar[str]

    # By these the runner says of each step whose it is, before it is computed.
    supports_omni_decode_step_metadata = True
    supports_omni_query_start_loc = True

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._requests_of_step: list[str] = []
        self._starts_of_step: torch.Tensor | None = None

    def update_decode_step_metadata(
        self,
        *,
        req_ids: Sequence[str] | None = None,
        omni_query_start_loc: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        """Take in whose the spans of the next step are; the runner calls it."""
        self._requests_of_step = list(req_ids or ())
        self._starts_of_step = omni_query_start_loc
        hosts = getattr(super(), "update_decode_step_metadata", None)
        if hosts is not None:
            others["omni_query_start_loc"] = omni_query_start_loc
            hosts(req_ids=None if req_ids is None else list(req_ids), **others)

    @abstractmethod
    def _reference(self, rows: ReferenceRows, codes: torch.Tensor) -> dict[str, Any]:
        """Return what a request is given, under `given` among others.

        Args:
            rows: Where the reference stands.
            codes: ``(num_frames, num_codebooks)`` int64, on the CPU.
        """

    def _give_references(
        self, infos: Sequence[dict[str, Any]], positions: torch.Tensor
    ) -> None:
        """Give each request that begins what the host needs of it."""
        for row, (request_id, info) in enumerate(
            zip(self._requests_of_step, infos, strict=False)
        ):
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
        """Raises: TTSCacheError, ValueError: it cannot be had, or is not such."""
        ref = self._speaker(info)
        rows = ReferenceRows.from_info(info)
        if begin > rows.start:  # the rest is in the prefix cache
            self._refuse_suspect(rows.prefix(ref), info)
        try:
            codes = torch.tensor(self._codes(ref, rows.num_rows), dtype=torch.long)
            given = self._reference(rows, codes)
        except Exception:
            self._suspect(rows.prefix(ref))
            raise
        if begin <= rows.start:
            self._suspect_prefixes.clear(rows.prefix(ref))
        self._count_prompt()
        return given

    def _codes(self, ref: SpeakerRef, num_rows: int) -> Array:
        """``(num_frames, num_codebooks)``, each inside its codebook.

        Raises: TTSCacheError, ValueError: they cannot be had, or are not such.
        """
        codes = self._encodings(ref, (CODEC,))[CODEC]["codes"]
        expected = (num_rows - self.num_added_rows, NUM_CODEBOOKS)
        return checked_codes(codes, expected, CODEBOOK_SIZE)

    def _begin_of(self, row: int, positions: torch.Tensor) -> int:
        """The position that the request's span of this step begins with."""
        starts = self._starts_of_step
        return int(positions[0 if starts is None else int(starts[row])])
