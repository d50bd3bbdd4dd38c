"""Prompts for Breeze-TTS-2 in an ``Omni`` engine."""

from functools import cached_property

from vllm_tts_cache.families.breeze_tts_2.prompt import PromptBuilder
from vllm_tts_cache.families.networks.offline import OfflinePrompts


class BreezePrompts(OfflinePrompts):
    """Builds the prompts of one checkpoint."""

    @cached_property
    def _builder(self) -> PromptBuilder:
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(self._model)
        return PromptBuilder(AutoTokenizer.from_pretrained(self._model, config=config))
