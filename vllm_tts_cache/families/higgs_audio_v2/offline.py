"""Prompts for Higgs Audio v2 in an ``Omni`` engine."""

from functools import cached_property

from vllm_tts_cache.families.higgs_audio_v2.prompt import PromptBuilder
from vllm_tts_cache.families.networks.offline import OfflinePrompts


class HiggsAudioV2Prompts(OfflinePrompts):
    """Builds the prompts of one checkpoint."""

    @cached_property
    def _builder(self) -> PromptBuilder:
        return PromptBuilder.of(self._model)
