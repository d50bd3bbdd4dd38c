"""The Qwen3-TTS talker, taking its speaker prompt by content address."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker import (
    Qwen3TTSTalkerForConditionalGeneration,
)

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.qwen3_tts import CODEC, FAMILY, SPEAKER
from vllm_tts_cache.model_executor.failed_requests import (
    FailedRequests,
    request_id_of,
)
from vllm_tts_cache.model_executor.speakers import WorkerSpeakers
from vllm_tts_cache.model_executor.wiring import load_worker_speakers
from vllm_tts_cache.speaker.family import CloneMode
from vllm_tts_cache.speaker.ref import FIELD, SpeakerRef


class CachedQwen3TTSTalker(Qwen3TTSTalkerForConditionalGeneration):
    """The host's talker; only where a speaker prompt comes from is ours."""

    tts_cache_speakers: WorkerSpeakers | None = None

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._failed_requests = FailedRequests()
        if self._use_v2_model_runner:
            # Only then does that runner say which row of the logits is whose.
            self.logitsprocs_need_output_token_ids = True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the talker, then our own encoders: no request pays for them."""
        loaded = super().load_weights(weights)
        # CustomVoice and VoiceDesign checkpoints have no encoders and clone nothing.
        if self.config.tts_model_type == "base":
            self.tts_cache_speakers = load_worker_speakers(self.vllm_config)
        return loaded

    def preprocess(
        self, input_ids: torch.Tensor, input_embeds: torch.Tensor | None, **info: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Build the prefill as the host does, with the speaker prompt put in first.

        Never raises for a request that names a speaker: it fails alone instead.
        """
        if FIELD not in info or not _is_first_prefill(info):
            return super().preprocess(input_ids, input_embeds, **info)
        request_id = request_id_of(info)
        if request_id in self._failed_requests:  # a later chunk of it
            return self._padding(input_ids)
        try:
            info["voice_clone_prompt"] = [self._voice_clone_prompt(info)]
            return super().preprocess(input_ids, input_embeds, **info)
        except Exception as exc:  # noqa: BLE001  raising here would end the engine
            self._failed_requests.add(request_id, exc, self.tts_cache_speakers)
            return self._padding(input_ids)

    def compute_logits(
        self, hidden_states: Any, sampling_metadata: Any = None
    ) -> torch.Tensor | None:
        """Force the id that ends a request without a speaker prompt as an error."""
        logits = super().compute_logits(hidden_states, sampling_metadata)
        if logits is None:
            return None
        return self._failed_requests.end(logits, self._batch_req_ids)

    def _voice_clone_prompt(self, info: Mapping[str, Any]) -> dict[str, Any]:
        ref = SpeakerRef.from_info(info)
        if ref is None or self.tts_cache_speakers is None:
            raise TTSCacheError("this checkpoint clones no voices")
        in_context = not (info.get("x_vector_only_mode") or [False])[0]
        mode = CloneMode.of(in_context=in_context)
        found = self.tts_cache_speakers.prompt(ref, FAMILY.encoders[mode])
        self.tts_cache_speakers.count_prompt()
        embedding = torch.tensor(found[SPEAKER]["speaker_embedding"])
        prompt = {"ref_spk_embedding": embedding, "icl_mode": in_context}
        if in_context:
            prompt["ref_code"] = torch.tensor(found[CODEC]["codes"]).long()
        return prompt

    def _padding(
        self, input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Prefill of a failed request; the first sampled id then ends it."""
        pad: torch.Tensor = self.get_buffer("_tts_pad_embed")
        padding = pad.to(input_ids.device, self._embedding_dtype)
        embeds = padding.reshape(1, -1).expand(input_ids.shape[0], -1)
        num_codes = int(self.talker_config.num_code_groups)
        codes = torch.zeros(
            (input_ids.shape[0], num_codes), dtype=torch.long, device=input_ids.device
        )
        pad_ids = torch.full_like(input_ids, int(self.talker_config.codec_pad_id))
        return pad_ids, embeds.contiguous(), {"codes": {"audio": codes}}


def _is_first_prefill(info: Mapping[str, Any]) -> bool:
    # Later chunks slice the embeddings that the first one stored.
    prefill = (info.get("embed") or {}).get("prefill")
    return bool(info.get("_omni_is_prefill", True)) and prefill is None
