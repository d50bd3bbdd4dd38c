"""The base of both slow ARs with a DAC, before the host's class."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_tts_cache.families.networks.prompts import ReferenceRows, checked_codes
from vllm_tts_cache.model_executor.talker import Built, CachedTalker, on_device
from vllm_tts_cache.speaker.reference import FIELD
from vllm_tts_cache.store.encoding import Array


class SlowAR(CachedTalker):
    """Adds the embeddings of a reference's codes to the rows of a prefill.

    Prompts hold real token ids, so the rows of any span of a prompt follow from the
    span's ids and the reference's codes, and nothing is kept from one chunk to the
    next.
    """

    codebook_embeddings: torch.nn.Embedding
    _num_codebooks: int
    _codebook_size: int

    @abstractmethod
    def _add_sums(self, span: Tensor, sums: Tensor) -> None:
        """Turn the rows of ids into rows of frames, in place.

        ``span`` has the rows of the semantic codes' ids, ``(num_frames, hidden_size)``;
        ``sums``, of the same shape, are `_codebook_sums`.
        """

    def _add_codes(self, rows: Tensor, info: Mapping[str, Any]) -> None:
        """Add the embeddings of a reference's codes to a span's rows, in place.

        Raises: TTSCacheError, ValueError: codes are missing or do not fit the prompt.
        """
        if FIELD in info:
            self._add_reference(rows, info)
            self._count_if_complete(rows, info)

    def _passed_over(self, input_ids: Tensor, info: Mapping[str, Any]) -> Built:
        """Return zero rows for a failed request; its first sampled id ends it."""
        num_tokens = len(input_ids)
        size = num_tokens, self.codebook_embeddings.weight.shape[1]
        rows = torch.zeros(size, dtype=torch.bfloat16, device=input_ids.device)
        update: dict[str, Any] = {"codes": {"audio": self._no_frames(input_ids)}}
        if num_tokens == 1 and not info.get("_omni_is_prefill", False):
            # The runner takes these out of the update of a decode step.
            update["mtp_inputs"] = (rows, rows)
        return input_ids, rows, update

    def _no_frames(self, input_ids: Tensor) -> Tensor:
        """Return ``(num_tokens, num_codebooks)`` zeros, which the host skips."""
        size = len(input_ids), self._num_codebooks
        return torch.zeros(size, dtype=torch.long, device=input_ids.device)

    def _add_reference(self, rows: Tensor, info: Mapping[str, Any]) -> None:
        """Add the codes' embeddings where the span holds frames of the reference.

        Raises: TTSCacheError, ValueError: codes are missing or do not fit the prompt.
        """
        ref = self._speaker(info)
        where = ReferenceRows.from_info(info)
        begin = begin_of(info)
        if begin > where.start:
            self._refuse_suspect(where.prefix(ref), info)
        first = max(where.start, begin)
        last = min(where.start + where.num_rows, begin + len(rows))
        if first >= last:
            return  # the frames' KV is cached, or they are in another chunk
        part = slice(first - where.start, last - where.start)
        try:
            expected = where.num_rows, self._num_codebooks
            codes = self._only_encoding(ref)["codes"]
            codes = checked_codes(codes, expected, self._codebook_size)
            sums = self._codebook_sums(codes[part])
        except Exception:
            self._suspect(where.prefix(ref))
            raise
        self._add_sums(rows[first - begin : last - begin], sums.to(rows.dtype))
        if first == where.start:
            self._suspect_prefixes.clear(where.prefix(ref))

    def _count_if_complete(self, rows: Tensor, info: Mapping[str, Any]) -> None:
        end = begin_of(info) + len(rows)
        if end >= int(info.get("_omni_prompt_len", end)):
            self._count_prompt()

    def _codebook_sums(self, codes: Array) -> Tensor:
        """Return ``(num_frames, hidden_size)``: sums over codebooks, in one gather."""
        starts = np.arange(self._num_codebooks) * self._codebook_size
        rows = codes.astype(np.int64) + starts
        device = self.codebook_embeddings.weight.device
        return self.codebook_embeddings(on_device(rows, device, torch.long)).sum(dim=1)


def begin_of(info: Mapping[str, Any]) -> int:
    """Return the first position of a request's span."""
    return int(info.get("_omni_num_computed_tokens", 0))
