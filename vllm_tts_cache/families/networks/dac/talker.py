"""What the slow ARs of both models with a DAC share; mixed in before the host's."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm_tts_cache.families.networks.rows import ReferenceRows, checked_codes
from vllm_tts_cache.model_executor.talker import CachedTalker, on_device
from vllm_tts_cache.speaker.reference import FIELD, SpeakerRef
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
    def _add_sums(self, span: torch.Tensor, sums: torch.Tensor) -> None:
        """Make rows of frames out of rows of ids, in place.

        Args:
            span: ``(num_frames, hidden_size)``, of the semantic codes' ids.
            sums: The same, of the codes' embeddings, see `_codebook_sums`.
        """

    def _add_codes(
        self, rows: torch.Tensor, input_ids: torch.Tensor, info: Mapping[str, Any]
    ) -> None:
        """Add to the rows of a span what its codes make of them, in place.

        Raises: TTSCacheError, ValueError: they cannot be had, or are not such.
        """
        self._add_spoken(rows, input_ids, info)
        if FIELD in info:
            self._add_reference(rows, info)
            self._count_if_complete(rows, info)

    def _passed_over(
        self, input_ids: torch.Tensor, info: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """A span of a failed request, whose first sampled id ends it."""
        num_tokens = len(input_ids)
        size = num_tokens, self.codebook_embeddings.weight.shape[1]
        rows = torch.zeros(size, dtype=torch.bfloat16, device=input_ids.device)
        update: dict[str, Any] = {"codes": {"audio": self._no_frames(input_ids)}}
        if num_tokens == 1 and not info.get("_omni_is_prefill", False):
            # What the runner takes out of the update of a step that decodes.
            update["mtp_inputs"] = (rows, rows)
        return input_ids, rows, update

    def _no_frames(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``(num_tokens, num_codebooks)`` zeros, which are no frame to the host."""
        size = len(input_ids), self._num_codebooks
        return torch.zeros(size, dtype=torch.long, device=input_ids.device)

    def _add_spoken(
        self, rows: torch.Tensor, input_ids: torch.Tensor, info: Mapping[str, Any]
    ) -> None:
        """Add what was spoken before a preemption; nothing if a model cannot resume."""

    def _add_reference(self, rows: torch.Tensor, info: Mapping[str, Any]) -> None:
        """Add the codes' embeddings where the span holds frames of the reference.

        Raises: TTSCacheError, ValueError: they cannot be had, or are not such.
        """
        ref = self._speaker(info)
        where = ReferenceRows.from_info(info)
        begin = begin_of(info)
        if begin > where.start:
            self._refuse_suspect(where.prefix(ref), info)
        first = max(where.start, begin)
        last = min(where.start + where.num_rows, begin + len(rows))
        if first >= last:
            return  # their KV is in the prefix cache, or they come in another chunk
        part = slice(first - where.start, last - where.start)
        sums = self._sums_or_suspect(ref, where, part)
        self._add_sums(rows[first - begin : last - begin], sums.to(rows.dtype))
        if first == where.start:
            self._suspect_prefixes.clear(where.prefix(ref))

    def _count_if_complete(self, rows: torch.Tensor, info: Mapping[str, Any]) -> None:
        end = begin_of(info) + len(rows)
        if end >= int(info.get("_omni_prompt_len", end)):
            self._count_prompt()

    def _sums_or_suspect(
        self, ref: SpeakerRef, where: ReferenceRows, part: slice
    ) -> torch.Tensor:
        try:
            return self._codebook_sums(self._codes(ref, where.num_rows)[part])
        except Exception:
            self._suspect(where.prefix(ref))
            raise

    def _codes(self, ref: SpeakerRef, num_frames: int) -> Array:
        """``(num_frames, num_codebooks)``, each inside its codebook.

        Raises: TTSCacheError, ValueError: they cannot be had, or are not such.
        """
        (codec,) = self.tts_cache_family.encoders
        codes = self._encodings(ref, (codec,))[codec]["codes"]
        expected = (num_frames, self._num_codebooks)
        return checked_codes(codes, expected, self._codebook_size)

    def _codebook_sums(self, codes: Array) -> torch.Tensor:
        """``(num_frames, hidden_size)``; one gather for all codebooks."""
        starts = np.arange(self._num_codebooks) * self._codebook_size
        rows = codes.astype(np.int64) + starts
        device = self.codebook_embeddings.weight.device
        return self.codebook_embeddings(on_device(rows, device, torch.long)).sum(dim=1)


def begin_of(info: Mapping[str, Any]) -> int:
    """Return the position that a span begins with."""
    return int(info.get("_omni_num_computed_tokens", 0))
