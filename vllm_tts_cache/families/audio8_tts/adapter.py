"""A clone request on Audio8 TTS becomes real token ids and a content address."""

import asyncio
from functools import cached_property
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.audio8_tts import Audio8TTSAdapter
from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest

from vllm_tts_cache.entrypoints.serving.adapter import Speaker, TextCheckingAdapter
from vllm_tts_cache.families.audio8_tts import prompt as audio8_prompt
from vllm_tts_cache.families.audio8_tts.family import CODEC, FAMILY
from vllm_tts_cache.families.audio8_tts.prompt import PromptBuilder, SemanticCodes
from vllm_tts_cache.speaker.reference import FIELD, EncodingNeed, SpeakerRef


class CachedAudio8TTSAdapter(TextCheckingAdapter, Audio8TTSAdapter):
    """The host's adapter; a clone's prompt holds the semantic codes."""

    tts_cache_family = FAMILY

    def tts_cache_check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would read as something else.

        Raises: InvalidSpeakerError.
        """
        audio8_prompt.check_text(field, text)

    async def warmup(self) -> None:
        """Load the tokenizer, so that the first request does not."""
        await asyncio.to_thread(lambda: self._builder)

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Build the prompt's token ids from text and codes.

        Raises: InvalidSpeakerError, EncodeError, WorkerRPCError.
        """
        request, ref = speaker.request, speaker.ref
        semantic = await self._semantic(ref)
        prompt = await self._service.texts.run(
            lambda: self._builder.clone(
                request.input, request.ref_text, ref=ref, semantic=semantic
            )
        )
        params = {FIELD: ref.to_wire()}
        return PreparedRequest(prompt=prompt, tts_params=params, model_type=FAMILY.name)

    async def _semantic(self, ref: SpeakerRef) -> SemanticCodes:
        ensurer = self._service.encodings.ensurer
        (key,) = await ensurer.keys(EncodingNeed(ref=ref, encoder_names=(CODEC,)))

        async def read() -> SemanticCodes:
            encoding = await ensurer.encoding(key, CODEC)
            return SemanticCodes.of(key, encoding["codes"])

        return await self._service.prompts.get_or_build(key, ref.audio_sha256, read)

    @cached_property
    def _builder(self) -> PromptBuilder:
        host: Any = self
        config = host.ctx.engine_client.model_config.hf_config
        return PromptBuilder(
            tokenizer=host._tokenizer(),
            first_semantic_id=int(config.semantic_begin_id),
        )
