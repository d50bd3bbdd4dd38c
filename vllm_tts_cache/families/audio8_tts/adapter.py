"""A clone request on Audio8 TTS becomes real token ids and a content address."""

from functools import cached_property
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.audio8_tts import Audio8TTSAdapter
from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest

from vllm_tts_cache.entrypoints.serving.adapter import Speaker
from vllm_tts_cache.families.audio8_tts.family import CODEC, FAMILY
from vllm_tts_cache.families.audio8_tts.prompt import PromptBuilder, SemanticCodes
from vllm_tts_cache.families.networks.adapter import PromptAdapter
from vllm_tts_cache.speaker.reference import EncodingNeed, SpeakerRef


class CachedAudio8TTSAdapter(PromptAdapter, Audio8TTSAdapter):
    """The host's adapter; a clone's prompt holds the semantic codes."""

    tts_cache_family = FAMILY

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Build the prompt's token ids from text and codes."""
        request, ref = speaker.request, speaker.clip.ref
        semantic = await self._semantic(ref)
        prompt = await self._service.texts.run(
            lambda: self._builder.clone(
                request.input, request.ref_text, ref=ref, semantic=semantic
            )
        )
        return self._prepared(speaker, prompt)

    async def _semantic(self, ref: SpeakerRef) -> SemanticCodes:
        encodings = self._service.encodings
        (key,) = await encodings.keys(EncodingNeed(ref=ref, encoder_names=(CODEC,)))

        async def read() -> SemanticCodes:
            encoding = await encodings.encoding(key)
            return SemanticCodes.of(key, encoding["codes"])

        return await self._service.prompts.get_or_build(key, ref.audio_sha256, read)

    @cached_property
    def _builder(self) -> PromptBuilder:
        host: Any = self
        config = host.ctx.engine_client.model_config.hf_config
        return PromptBuilder(
            tokenizer=host._tokenizer(), first_semantic_id=int(config.semantic_begin_id)
        )
