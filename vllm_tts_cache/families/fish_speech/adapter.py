"""A clone request on Fish Speech becomes real token ids and a content address."""

import hashlib
from functools import cached_property
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest
from vllm_omni.entrypoints.openai.tts_adapters.fish_speech import FishSpeechAdapter

from vllm_tts_cache.entrypoints.serving.adapter import Speaker
from vllm_tts_cache.entrypoints.speakers.inline import Clip
from vllm_tts_cache.families.fish_speech.family import CODEC, FAMILY
from vllm_tts_cache.families.fish_speech.prompt import PromptBuilder, VoicePart
from vllm_tts_cache.families.networks.adapter import PromptAdapter
from vllm_tts_cache.speaker.reference import EncodingNeed

# Salt of all texts without a voice, which share the KV of their system turn.
_NO_VOICE = "fish_speech without a voice"


class CachedFishSpeechAdapter(PromptAdapter, FishSpeechAdapter):
    """The host's adapter; a clone's prompt holds the semantic codes."""

    tts_cache_family = FAMILY

    async def speak(self, request: Any, *others: Any) -> PreparedRequest:
        """Build as the host, with a salt that all texts without a voice share."""
        prepared = await super().speak(request, *others)
        prepared.prompt["cache_salt"] = _NO_VOICE
        return prepared

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Build the prompt's token ids from text and codes."""
        text, ref = speaker.request.input, speaker.clip.ref
        voice = await self._voice(speaker.clip, speaker.request.ref_text)
        prompt = await self._service.texts.run(self._builder.speak, voice, text, ref)
        return self._prepared(speaker, prompt)

    async def _voice(self, clip: Clip, ref_text: str) -> VoicePart:
        ref, num_clips = clip.ref, clip.num_clips
        need = EncodingNeed(ref=ref, encoder_names=(CODEC,))
        (key,) = await self._service.encodings.keys(need)

        async def build() -> VoicePart:
            codes = (await self._service.encodings.encoding(key))["codes"]
            given = ref_text, key, codes, num_clips
            return await self._service.texts.run(self._builder.voice, *given)

        where = key, hashlib.sha256(ref_text.encode()).digest()
        get = self._service.prompts.get_or_build
        return await get(where, ref.audio_sha256, build)

    @cached_property
    def _builder(self) -> PromptBuilder:
        host: Any = self
        engine_client: Any = self.ctx.engine_client
        config = engine_client.model_config.hf_config
        return PromptBuilder(
            tokenizer=host._get_tokenizer(),
            first_semantic_id=int(config.semantic_start_token_id),
        )
