"""Prompts for Audio8 TTS in an ``Omni`` engine: real token ids, the codes in them."""

from functools import cached_property
from typing import Any

from vllm_tts_cache.families.audio8_tts.family import CODEC
from vllm_tts_cache.families.audio8_tts.prompt import PromptBuilder, SemanticCodes
from vllm_tts_cache.families.networks.offline import OfflinePrompts
from vllm_tts_cache.offline.speakers import PreparedSpeaker


class Audio8Prompts(OfflinePrompts):
    """Builds the prompts of one checkpoint."""

    def _clone(self, speaker: PreparedSpeaker, text: str) -> dict[str, Any]:
        assert speaker.ref_text is not None  # `prepare` has refused it
        key, encoding = self._encoding(speaker.ref, CODEC)
        semantic = SemanticCodes.of(key, encoding["codes"])
        return self._builder.clone(
            text, speaker.ref_text, ref=speaker.ref, semantic=semantic
        )

    @cached_property
    def _builder(self) -> PromptBuilder:
        from transformers import AutoTokenizer
        from vllm_omni.model_executor.models.audio8_tts.configuration_audio8_tts import (  # noqa: E501
            Audio8TTSConfig,
        )

        return PromptBuilder(
            tokenizer=AutoTokenizer.from_pretrained(self._model),
            first_semantic_id=Audio8TTSConfig(**self._config).semantic_begin_id,
        )
