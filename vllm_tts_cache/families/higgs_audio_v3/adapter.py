"""A clone request on Higgs Audio v3 becomes token ids and a content address."""

from vllm_omni.entrypoints.openai.tts_adapters.higgs_audio_v3 import HiggsAudioV3Adapter
from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_tokenizer import (
    HiggsAudioV3TokenizerAdapter,
)

from vllm_tts_cache.families.higgs_audio_v3.family import FAMILY
from vllm_tts_cache.families.higgs_audio_v3.prompt import PromptBuilder
from vllm_tts_cache.families.networks.adapter import PromptAdapter


class CachedHiggsAudioV3Adapter(PromptAdapter, HiggsAudioV3Adapter):
    """The host's adapter; a clone's prompt names its codes, and begins with them."""

    tts_cache_family = FAMILY
    prompt_builder = PromptBuilder

    async def _resolve_higgs_audio_v3_adapter(self) -> HiggsAudioV3TokenizerAdapter:
        """Return the host's adapter with our tokenizer, for texts without a voice.

        The host would load another tokenizer on the event loop, at the first such text.
        """
        return (await self._service.texts.run(lambda: self._builder)).hosts
