"""A clone request on VoxCPM2 becomes token ids and a content address."""

from functools import cached_property
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.voxcpm2 import VoxCPM2Adapter

from vllm_tts_cache.families.networks.adapter import PromptAdapter
from vllm_tts_cache.families.voxcpm2.family import FAMILY
from vllm_tts_cache.families.voxcpm2.prompt import PromptBuilder


class CachedVoxCPM2Adapter(PromptAdapter, VoxCPM2Adapter):
    """The host's adapter; a clone's prompt names its encoding."""

    tts_cache_family = FAMILY

    @cached_property
    def _builder(self) -> PromptBuilder:
        host: Any = self
        host._encode("")  # loads the tokenizer
        return PromptBuilder(host._tokenizer, host._split_map)
