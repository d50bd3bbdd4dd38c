"""Prompts for Fish Speech in an ``Omni`` engine: real token ids, the codes in them."""

from functools import cached_property
from typing import Any

from vllm_tts_cache.families.fish_speech.family import CODEC
from vllm_tts_cache.families.fish_speech.prompt import PromptBuilder
from vllm_tts_cache.families.networks.offline import OfflinePrompts
from vllm_tts_cache.offline.speakers import PreparedSpeaker


class FishSpeechPrompts(OfflinePrompts):
    """Builds the prompts of one checkpoint."""

    def _clone(self, speaker: PreparedSpeaker, text: str) -> dict[str, Any]:
        assert speaker.ref_text is not None  # `prepare` has refused it
        key, encoding = self._encoding(speaker.ref, CODEC)
        built = self._builder.clone(text, speaker.ref_text, key, encoding["codes"])
        return built.to_engine(speaker.ref)

    @cached_property
    def _builder(self) -> PromptBuilder:
        from transformers import AutoTokenizer
        from vllm_omni.model_executor.models.fish_speech.configuration_fish_speech import (  # noqa: E501
            FishSpeechConfig,
        )

        config = FishSpeechConfig(**self._config)
        return PromptBuilder(
            tokenizer=AutoTokenizer.from_pretrained(self._model),
            first_semantic_id=int(config.semantic_start_token_id),
        )
