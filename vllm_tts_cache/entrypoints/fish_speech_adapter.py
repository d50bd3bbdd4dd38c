"""A clone request on Fish Speech becomes real token ids and a content address."""

import asyncio
from functools import cached_property
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest
from vllm_omni.entrypoints.openai.tts_adapters.fish_speech import FishSpeechAdapter

from vllm_tts_cache.entrypoints.request_speaker import RequestSpeaker, current_speaker
from vllm_tts_cache.families.fish_speech import CODEC, FAMILY
from vllm_tts_cache.families.fish_speech import prompt as fish_prompt
from vllm_tts_cache.speaker.family import CloneMode
from vllm_tts_cache.speaker.ref import SpeakerRef

# All texts without a voice share the KV of the system turn that they begin with.
_NO_VOICE = "fish_speech without a voice"
_DEFAULT_VOICE = "default"


class CachedFishSpeechAdapter(FishSpeechAdapter):
    """The host's adapter; the waveform stays where it is stored."""

    tts_cache_family = FAMILY

    def validate(self, request: Any) -> str | None:
        """As the host, but OpenAI clients' placeholder for a voice is none."""
        if (request.voice or "").strip().lower() == _DEFAULT_VOICE:
            request.voice = None
        host: Any = super()
        return host.validate(request)

    def tts_cache_check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would read as something else.

        Raises: InvalidSpeakerError.
        """
        fish_prompt.checked_text(field, text)

    async def warmup(self) -> None:
        """Load the tokenizer, so that the first request does not."""
        await asyncio.to_thread(lambda: self._builder)

    async def build(
        self, request: Any, sampling_params_list: list[Any], has_inline_ref_audio: bool
    ) -> PreparedRequest:
        """Wait for the speaker's codes, then build a prompt that holds them.

        Raises: InvalidSpeakerError, EncodeError, EncodeTimeoutError, WorkerRPCError.
        """
        self.tts_cache_check_text("input", request.input)
        speaker = current_speaker.get()
        if speaker is None or speaker.clip is None:
            host: Any = super()
            prepared = await host.build(
                request, sampling_params_list, has_inline_ref_audio
            )
            prepared.prompt["cache_salt"] = _NO_VOICE
            return prepared
        self.tts_cache_check_text("ref_text", request.ref_text)
        prompt = await self._clone(request, speaker)
        return PreparedRequest(prompt=prompt, model_type="fish_speech")

    async def _clone(self, request: Any, speaker: RequestSpeaker) -> dict[str, Any]:
        assert speaker.clip is not None
        ref, service = speaker.clip.ref, self.ctx.server.speakers
        await speaker.ensure(service.ensurer, FAMILY.encoders[CloneMode.IN_CONTEXT])
        voice = await self._voice(ref, request.ref_text)
        built = await asyncio.to_thread(self._builder.speak, voice, request.input)
        return built.to_engine(ref)

    async def _voice(self, ref: SpeakerRef, ref_text: str) -> fish_prompt.VoicePart:
        service = self.ctx.server.speakers
        key = await service.encodings.key(ref, CODEC)

        async def build() -> fish_prompt.VoicePart:
            codes = (await service.encodings.get(key, ref.segment, CODEC))["codes"]
            return await asyncio.to_thread(self._builder.voice, ref_text, key, codes)

        salt = fish_prompt.salt_of(key, ref_text)
        return await service.prompts.get_or_build(salt, ref.audio_sha256, build)

    @cached_property
    def _builder(self) -> fish_prompt.PromptBuilder:
        host: Any = self
        engine_client: Any = self.ctx.engine_client
        config = engine_client.model_config.hf_config
        return fish_prompt.PromptBuilder(
            tokenizer=host._get_tokenizer(),
            first_semantic_id=int(config.semantic_start_token_id),
        )
