"""The Audio8 TTS slow AR, taking its reference codes by content address."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from vllm_omni.model_executor.models.audio8_tts import audio8_tts_slow_ar as host

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.audio8_tts.family import CODEC, FAMILY
from vllm_tts_cache.families.networks.codes import checked_codes
from vllm_tts_cache.families.networks.rows import ReferenceRows
from vllm_tts_cache.model_executor.sampling_talker import SamplingTalker
from vllm_tts_cache.model_executor.talker import on_device
from vllm_tts_cache.speaker.ref import FIELD, SpeakerRef
from vllm_tts_cache.store.encoding import Array

# Of a request whose waveform is to be encoded by the host; our adapter sends none.
_HOSTS_OWN_CLONE = "audio8_structured_voice_clone"


class CachedAudio8SlowAR(SamplingTalker, host.Audio8TTSSlowARForConditionalGeneration):
    """The host's slow AR; only the rows that a prefill starts from are ours.

    Prompts hold real token ids, so the rows of any span of a prompt follow from the
    span's ids and the reference's codes, and nothing is kept from one chunk to the
    next. The host keeps a prompt's rows in pinned memory, which a CPU has not.
    """

    tts_cache_family = FAMILY

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the slow AR, then our own encoder: no request pays for it."""
        loaded = super().load_weights(weights)
        self._load_speakers(self.vllm_config)
        return loaded

    def preprocess(
        self, input_ids: torch.Tensor, input_embeds: torch.Tensor | None, **info: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Build a span of a prefill; decoding is the host's.

        Never raises for a request that names a speaker: it fails alone instead.
        """
        # Not by the span's length alone: the last chunk of a prefill may be one token.
        is_prefill = info.get("_omni_is_prefill", input_ids.shape[0] > 1)
        if not is_prefill or info.get(_HOSTS_OWN_CLONE):
            return super().preprocess(input_ids, input_embeds, **info)
        rows = self.embed_input_ids(input_ids).to(torch.bfloat16)
        self._add_reference_or_fail(rows, info)
        codes = torch.zeros(
            (len(input_ids), self._num_codebooks),
            device=input_ids.device,
            dtype=torch.long,
        )
        padding = torch.full_like(input_ids, self._pad_token_id)
        return padding, rows, {"codes": {"audio": codes}}

    def _add_reference_or_fail(
        self, rows: torch.Tensor, info: Mapping[str, Any]
    ) -> None:
        if FIELD not in info or self._has_failed(info):
            return
        try:
            if (ref := SpeakerRef.from_info(info)) is None:
                raise TTSCacheError("it names nobody")
            self._add_reference(rows, info, ref)
        except Exception as exc:  # noqa: BLE001  raising here would end the engine
            self._fail(info, exc)

    def _add_reference(
        self, rows: torch.Tensor, info: Mapping[str, Any], ref: SpeakerRef
    ) -> None:
        """Add the codes' embeddings where the span holds frames of the reference."""
        where = ReferenceRows.from_info(info)
        begin = int(info.get("_omni_num_computed_tokens", 0))
        if begin > where.start:
            self._refuse_suspect(where.prefix(ref), info)
        first = max(where.start, begin)
        last = min(where.start + where.num_rows, begin + len(rows))
        if first < last:  # else it is in the prefix cache, or in another chunk
            part = slice(first - where.start, last - where.start)
            summed = self._sums_or_suspect(ref, where, part)
            rows[first - begin : last - begin] += summed.to(rows.dtype)
            if first == where.start:
                self._suspect_prefixes.clear(where.prefix(ref))
        end = begin + len(rows)
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
        codes = self._encodings(ref, (CODEC,))[CODEC]["codes"]
        expected = (num_frames, self._num_codebooks)
        return checked_codes(codes, expected, self._codebook_size)

    def _codebook_sums(self, codes: Array) -> torch.Tensor:
        """``(num_frames, hidden_size)``; one gather for all codebooks."""
        starts = np.arange(self._num_codebooks) * self._codebook_size
        rows = codes.astype(np.int64) + starts
        device = self.codebook_embeddings.weight.device
        return self.codebook_embeddings(on_device(rows, device, torch.long)).sum(dim=1)
