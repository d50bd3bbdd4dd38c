"""The Qwen3-TTS talker, taking its speaker prompt by content address."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker import (
    Qwen3TTSTalkerForConditionalGeneration,
)

from vllm_tts_cache.families.qwen3_tts.family import (
    CODEC,
    FAMILY,
    IN_CONTEXT,
    SPEAKER,
    X_VECTOR,
)
from vllm_tts_cache.model_executor.talker import CachedTalker, failing_alone, on_device
from vllm_tts_cache.speaker.reference import FIELD


class CachedQwen3TTSTalker(CachedTalker, Qwen3TTSTalkerForConditionalGeneration):
    """The host's talker; only where a speaker prompt comes from is ours."""

    tts_cache_family = FAMILY

    @failing_alone
    def preprocess(
        self, input_ids: torch.Tensor, input_embeds: torch.Tensor | None, **info: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Build the prefill as the host does, with the speaker prompt put in first."""
        if FIELD not in info or not _is_first_prefill(info):
            return super().preprocess(input_ids, input_embeds, **info)
        prefix = _prefix_of(info)
        is_whole = int(info.get("_omni_num_computed_tokens", 0)) == 0
        try:
            if not is_whole:
                self._refuse_suspect(prefix, info)
            device = input_ids.device
            info["voice_clone_prompt"] = [self._voice_clone_prompt(info, device)]
            prefill = super().preprocess(input_ids, input_embeds, **info)
        except Exception:
            self._suspect(prefix)
            raise
        if is_whole:
            self._suspect_prefixes.clear(prefix)
        return prefill

    def _voice_clone_prompt(
        self, info: Mapping[str, Any], device: torch.device
    ) -> dict[str, Any]:
        ref = self._speaker(info)
        in_context = not (info.get("x_vector_only_mode") or [False])[0]
        mode = IN_CONTEXT if in_context else X_VECTOR
        found = self._encodings(ref, mode.encoders)
        self._count_prompt()
        embedding = on_device(found[SPEAKER]["speaker_embedding"], device)
        prompt = {"ref_spk_embedding": embedding, "icl_mode": in_context}
        if in_context:
            codes = found[CODEC]["codes"]
            prompt["ref_code"] = on_device(codes, device, torch.long)
        return prompt

    def _passed_over(
        self,
        input_ids: torch.Tensor,
        info: Mapping[str, Any],  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Prefill of a failed request; the first sampled id then ends it.

        What it leaves behind has all that the host's own prefill leaves: the host
        joins each of these values over the batch, and one that is missing would give
        the request's neighbours each other's (or no later step could run).
        """
        device = input_ids.device
        pad: torch.Tensor = self.get_buffer("_tts_pad_embed")
        padding = pad.to(device, self._embedding_dtype).reshape(1, -1)
        num_tokens, num_codes = len(input_ids), int(self.talker_config.num_code_groups)
        codes = torch.zeros((num_tokens, num_codes), dtype=torch.long, device=device)
        update = {
            "embed": {"prefill": padding[:0]},  # the host pads what is missing
            "hidden_states": {"trailing_text": padding[:0]},
            "codes": {"audio": codes, "ref": codes[:0]},
            "meta": {
                "talker_text_offset": 0,
                "talker_prefill_offset": num_tokens,
                "codec_streaming": True,  # as of every clone
                "codec_frame_valid": torch.zeros((), dtype=torch.bool, device=device),
                "ref_code_len": 0,
            },
        }
        pad_ids = torch.full_like(input_ids, int(self.talker_config.codec_pad_id))
        return pad_ids, padding.repeat(num_tokens, 1), update


def _is_first_prefill(info: Mapping[str, Any]) -> bool:
    # Later chunks slice the embeddings that the first one stored.
    prefill = (info.get("embed") or {}).get("prefill")
    return bool(info.get("_omni_is_prefill", True)) and prefill is None


def _prefix_of(info: Mapping[str, Any]) -> str:
    """Name the KV prefix: the ids are placeholders, and the salt holds voice and text.

    What else the salt holds is left out: to suspect a prefix too many costs one retry.
    """
    return f"{info.get(FIELD)} {info.get('text')}"
