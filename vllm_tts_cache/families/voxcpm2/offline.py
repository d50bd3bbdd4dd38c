"""Prompts for VoxCPM2 in an ``Omni`` engine: placeholder ids of the right number."""

from functools import cached_property

from vllm_tts_cache.families.networks.offline import OfflinePrompts
from vllm_tts_cache.families.voxcpm2.prompt import PromptBuilder


class VoxCPM2Prompts(OfflinePrompts):
    """Builds the prompts of one checkpoint."""

    @cached_property
    def _builder(self) -> PromptBuilder:
        from transformers import AutoTokenizer
        from vllm_omni.model_executor.models.voxcpm2.voxcpm2_talker import (
            build_cjk_split_map,
        )

        tokenizer = AutoTokenizer.from_pretrained(self._model)
        return PromptBuilder(tokenizer, build_cjk_split_map(tokenizer))
