"""The VoxCPM2 talker, taking a reference's features by content address."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm_omni.model_executor.models.voxcpm2 import voxcpm2_import_utils
from vllm_omni.model_executor.models.voxcpm2 import voxcpm2_talker as host

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.networks.prompts import (
    KnownEncoding,
    check_length,
    mode_of_request,
)
from vllm_tts_cache.families.voxcpm2.family import CONTINUATION, FAMILY, REFERENCE
from vllm_tts_cache.families.voxcpm2.prompt import count_positions, ids_of_request
from vllm_tts_cache.model_executor import talker
from vllm_tts_cache.model_executor.failed_requests import request_id_of
from vllm_tts_cache.model_executor.talker import Built
from vllm_tts_cache.speaker.family import Mode
from vllm_tts_cache.speaker.reference import FIELD, SpeakerRef

# Where the host looks for the features, by mode.
_HOSTS_NAMES = {REFERENCE: "ref_audio_feat", CONTINUATION: "audio_feat"}


class CachedVoxCPM2Talker(
    talker.CachedTalker, host.VoxCPM2TalkerForConditionalGeneration
):
    """The host's talker with a reference's features from stored encodings."""

    tts_cache_family = FAMILY

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        try:
            voxcpm2_import_utils.import_voxcpm2_core()
        except ImportError as exc:
            raise talker.logged_error(
                "VoxCPM2 runs on its official package, which cannot be imported here. "
                f"Install it: pip install 'voxcpm==2.0.3' ({exc})"
            ) from exc
        talker.refuse_prefix_caching(vllm_config, FAMILY)
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    @talker.failing_alone
    def preprocess(self, input_ids: Tensor, input_embeds: Any, **info: Any) -> Built:
        """Build a span as the host does, a prefill's from stored features."""
        is_prefill = info.get("_omni_is_prefill", input_ids.shape[0] > 1)
        is_first = is_prefill and int(info.get("_omni_num_computed_tokens", 0)) == 0
        if FIELD in info and is_first:
            info["reference_audio"] = [self._known_prompt(info)]
        num_noted = len(self._pending_requests)
        try:
            built = super().preprocess(input_ids, input_embeds, **info)
            if is_prefill:
                self._check_length(info)
        except Exception:
            del self._pending_requests[num_noted:]  # as `_passed_over` notes the span
            raise
        return built

    def _check_length(self, info: Mapping[str, Any]) -> None:
        """Refuse a prompt that the host built with another length than announced.

        Its prefill would never be complete, and the second language model's attention,
        whose metadata counts all rows, would read past the end of memory. Ids from a
        route of the host have this effect, unless they begin as its tokenizer's do.

        Raises: TTSCacheError.
        """
        state = self._active_states[request_id_of(info)]
        embeds: Any = state.prefill_embeds
        check_length(len(embeds), info.get("_omni_prompt_len", len(embeds)))

    def _build_prompt_cache(
        self,
        ref_audio: object = None,
        prompt_audio: object = None,
        prompt_text: str | None = None,
    ) -> dict[str, Any] | None:
        if isinstance(ref_audio, KnownEncoding):
            return ref_audio.value
        return super()._build_prompt_cache(ref_audio, prompt_audio, prompt_text)

    def _known_prompt(self, info: Mapping[str, Any]) -> KnownEncoding:
        """Return what `_build_prompt_cache` does. Raises: TTSCacheError, ValueError."""
        ref = self._speaker(info)
        mode = mode_of_request(FAMILY, info)
        features = self._features(ref, mode)
        num_ids = len(ids_of_request(info))
        made = count_positions(mode, num_ids=num_ids, num_positions=len(features))
        # With a position too few the host ends the engine, and with one too many the
        # request's prefill is never complete.
        check_length(made, info.get("_omni_prompt_len", made))
        self._count_prompt()
        # Without the transcript, whose ids are among the text's: the host would make
        # them again, and not always as many.
        return KnownEncoding({"mode": mode.name, _HOSTS_NAMES[mode]: features})

    def _features(self, ref: SpeakerRef, mode: Mode) -> Tensor:
        """Return ``(num_positions, patch_size, feat_dim)`` float32, on the CPU.

        Raises: TTSCacheError: features are missing or do not fit the model.
        """
        (encoder,) = mode.encoders
        found = self._encodings(ref, mode.encoders)
        features = torch.tensor(found[encoder]["features"])
        if features.shape[1:] != (self._patch_size, self._feat_dim):
            raise TTSCacheError(
                f"its features are {tuple(features.shape)}, and the model takes "
                f"patches of {self._patch_size} of {self._feat_dim}"
            )
        return features

    def _passed_over(self, input_ids: Tensor, info: Mapping[str, Any]) -> Built:
        """Return zero rows for a failed request; its first sampled id ends it.

        The host takes the rows for a part of a prefill that is never the last: it makes
        no audio of them, and both language models compute them. Without the rows the
        second one's attention, whose metadata counts them, would read past its memory.
        """
        request_id = request_id_of(info)
        self._cleanup_request(request_id)
        state = self._get_or_create_state(request_id)
        state.prefill_masks = self._no_reference(input_ids.device)
        span_len = input_ids.shape[0]
        size = (span_len, self.config.hidden_size)
        dtype: Any = self._side_dtype
        zeros = torch.zeros(size, device=input_ids.device, dtype=dtype)
        self._pending_requests.append((request_id, True, zeros, span_len))
        return input_ids, zeros, {}

    def _no_reference(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the host's masks and features of a prompt that is all text."""
        one = torch.ones((1, 1), dtype=torch.int32, device=device)
        of: Any = {"dtype": self._side_dtype, "device": device}
        patch: Any = (1, 1, self._patch_size, self._feat_dim)
        row = (1, 1, self.config.hidden_size)
        feat, embed = torch.zeros(patch, **of), torch.zeros(row, **of)
        length = self.vllm_config.model_config.max_model_len
        return tuple(
            each.expand(-1, length, *(-1,) * (each.ndim - 2))
            for each in (one, torch.zeros_like(one), feat, embed)
        )
