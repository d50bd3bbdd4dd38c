"""The Qwen3-TTS talker, taking its speaker prompt by content address."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm_omni.model_executor.models.qwen3_tts import qwen3_tts_talker as host

from vllm_tts_cache.families.qwen3_tts import family
from vllm_tts_cache.logs import logger
from vllm_tts_cache.model_executor import talker
from vllm_tts_cache.model_executor.talker import Built
from vllm_tts_cache.speaker.reference import FIELD


class CachedQwen3TTSTalker(
    talker.CachedTalker, host.Qwen3TTSTalkerForConditionalGeneration
):
    """The host's talker with speaker prompts from stored encodings."""

    tts_cache_family = family.FAMILY

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the talker; a talker that decodes as well keeps no decoder states."""
        if getattr(self, "stream_decode", False):
            logger.warning(
                "This deploy file decodes in the talker: the reference of a voice is "
                "decoded for each request, and SPEAKER_CACHE_DECODER_MAX_BYTES has no "
                "effect. With two stages it is decoded once."
            )
        return super().load_weights(weights)

    def preprocess_prefill_rows_mrv2(
        self, *, entries: Sequence[Any], **tensors: Any
    ) -> list[dict[str, Any] | None]:
        """Build rows for several requests as vLLM-Omni 0.32; `preprocess` for the rest.

        One that it cannot read would end the engine; `preprocess` fails it alone.
        """
        host: Any = super()
        try:
            return host.preprocess_prefill_rows_mrv2(entries=entries, **tensors)
        except Exception as exc:  # noqa: BLE001  raising here would end the engine
            logger.warning("Prefills are built one by one: %s", type(exc).__name__)
            return [None] * len(entries)

    @talker.failing_alone
    def preprocess(self, input_ids: Tensor, input_embeds: Any, **info: Any) -> Built:
        """Build the prefill as the host does, from our speaker prompt."""
        # Later chunks slice the embeddings that the first one stored.
        stored = (info.get("embed") or {}).get("prefill")
        is_first = info.get("_omni_is_prefill", True) and stored is None
        if FIELD not in info or not is_first:
            return super().preprocess(input_ids, input_embeds, **info)
        # Its KV prefix by voice and text: one too many under suspicion costs a retry.
        prefix = f"{info.get(FIELD)} {info.get('text')}"
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
        mode = family.IN_CONTEXT if in_context else family.X_VECTOR
        found = self._encodings(ref, mode.encoders)
        self._count_prompt()
        embedding = talker.on_device(found[family.SPEAKER]["speaker_embedding"], device)
        prompt = {"ref_spk_embedding": embedding, "icl_mode": in_context}
        if in_context:
            codes = found[family.CODEC]["codes"]
            prompt["ref_code"] = talker.on_device(codes, device, torch.long)
        return prompt

    def _passed_over(self, input_ids: Tensor, info: Mapping[str, Any]) -> Built:
        """Return harmless rows for a failed request; its first sampled id ends it.

        The update holds every value of the host's own prefill: the host joins each of
        them over the batch, and a missing one would give other requests each other's
        (or no later step could run).
        """
        del info
        device = input_ids.device
        pad: Tensor = self.get_buffer("_tts_pad_embed")
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
                "codec_streaming": True,  # as for every clone
                "codec_frame_valid": torch.zeros((), dtype=torch.bool, device=device),
                "ref_code_len": 0,
            },
        }
        pad_ids = torch.full_like(input_ids, int(self.talker_config.codec_pad_id))
        return pad_ids, padding.repeat(num_tokens, 1), update
