"""Prompts for Qwen3-TTS in an ``Omni`` engine: placeholder ids of the right number."""

import hashlib
import json
from functools import cached_property
from typing import Any

from vllm_tts_cache.families.networks import prompts
from vllm_tts_cache.families.networks.qwen3_codec.frames import num_codec_frames
from vllm_tts_cache.families.qwen3_tts.family import HANDED_ON, IN_CONTEXT
from vllm_tts_cache.offline import PreparedSpeaker
from vllm_tts_cache.speaker.reference import FIELD


class Qwen3TTSPrompts(prompts.OfflinePrompts):
    """Builds the prompts of one checkpoint."""

    def prompt(
        self, speaker: PreparedSpeaker, text: str, language: str
    ) -> prompts.Prompt:
        """Return the prompt that speaks ``text``."""
        information = _information(speaker, text, language)
        num_tokens = self._num_tokens(information)
        # The ids are placeholders: without a salt all prompts would share a prefix.
        canonical = json.dumps(information, sort_keys=True)
        salt = hashlib.sha256(canonical.encode()).hexdigest()
        return prompts.engine_prompt([1] * num_tokens, information, salt)

    def _num_tokens(self, information: dict[str, list[Any]]) -> int:
        from vllm_omni.model_executor.models.qwen3_tts.prompt_embeds_builder import (
            Qwen3TTSPromptEmbedsBuilder,
        )

        estimate = (
            Qwen3TTSPromptEmbedsBuilder.estimate_prompt_len_from_additional_information
        )
        talker_config = self._config["talker_config"]
        return estimate(
            additional_information=information,
            task_type="Base",
            tokenize_prompt=lambda text: self._tokenizer(text, padding=False).input_ids,
            codec_language_id=talker_config.get("codec_language_id"),
            spk_is_dialect=talker_config.get("spk_is_dialect"),
        )

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model, padding_side="left")


def _information(
    speaker: PreparedSpeaker, text: str, language: str
) -> dict[str, list[Any]]:
    information: dict[str, list[Any]] = {
        "task_type": ["Base"],
        "text": [text],
        "language": [language],
        "instruct": [""],
        "x_vector_only_mode": [speaker.mode is not IN_CONTEXT],
        FIELD: [*speaker.ref.to_wire()],
    }
    if speaker.mode is IN_CONTEXT:
        num_frames = num_codec_frames(speaker.num_samples, speaker.sample_rate_hz)
        information["ref_text"] = [speaker.ref_text]
        information["ref_code_length"] = [num_frames]
        # The voices of a job are never deleted, so the decoder may cache their states.
        information[HANDED_ON] = [speaker.ref.audio_sha256]
    return information
