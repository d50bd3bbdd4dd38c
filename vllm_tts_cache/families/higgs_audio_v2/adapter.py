"""A clone request on Higgs Audio v2 becomes token ids and a content address."""

from vllm_omni.entrypoints.openai.tts_adapters.higgs_audio_v2 import HiggsAudioV2Adapter

from vllm_tts_cache.families.higgs_audio_v2.family import FAMILY
from vllm_tts_cache.families.higgs_audio_v2.prompt import PromptBuilder
from vllm_tts_cache.families.networks.adapter import PromptAdapter


class CachedHiggsAudioV2Adapter(PromptAdapter, HiggsAudioV2Adapter):
    """The host's adapter; a clone's prompt names its codes."""

    tts_cache_family = FAMILY
    prompt_builder = PromptBuilder
