"""A clone request on Qwen3-TTS becomes text and a content address."""

from typing import Any

from vllm.inputs import tokens_input
from vllm_omni.entrypoints.openai.tts_adapters.base import (
    PreparedRequest,
    conditioning_cache_salt,
)
from vllm_omni.entrypoints.openai.tts_adapters.qwen3_tts import Qwen3TTSAdapter

from vllm_tts_cache.entrypoints.request_speaker import RequestSpeaker, current_speaker
from vllm_tts_cache.families.qwen3_tts import FAMILY
from vllm_tts_cache.families.qwen3_tts.frames import num_codec_frames
from vllm_tts_cache.speaker.family import CloneMode
from vllm_tts_cache.speaker.ref import FIELD


class CachedQwen3TTSAdapter(Qwen3TTSAdapter):
    """The host's adapter; the waveform stays where it is stored."""

    tts_cache_family = FAMILY

    async def build(
        self, request: Any, sampling_params_list: list[Any], has_inline_ref_audio: bool
    ) -> PreparedRequest:
        """Wait for the speaker's encodings, then build a prompt that names them.

        Raises: EncodeError, EncodeTimeoutError, WorkerRPCError.
        """
        speaker = current_speaker.get()
        if speaker is None or speaker.clip is None:
            return await super().build(
                request, sampling_params_list, has_inline_ref_audio
            )
        mode = CloneMode.of(in_context=speaker.in_context)
        ensurer = self.ctx.server.speakers.ensurer
        await speaker.ensure(ensurer, FAMILY.encoders[mode])
        request = request.model_copy(update={"ref_audio": None})
        params = self._params(request, speaker)
        host: Any = self  # its registering decorator hides the class from checkers
        num_tokens = await host._estimate_prompt_len_async(params)
        prompt: dict[str, Any] = {**tokens_input(prompt_token_ids=[1] * num_tokens)}
        prompt["additional_information"] = params
        prompt["cache_salt"] = conditioning_cache_salt(request, params)
        return PreparedRequest(prompt=prompt, tts_params=params, model_type="Base")

    def _params(self, request: Any, speaker: RequestSpeaker) -> dict[str, Any]:
        assert speaker.clip is not None
        host: Any = self
        params = host._build_tts_params(request)
        params[FIELD] = speaker.clip.ref.to_wire()
        # The host folds this field into the salt of its prefix cache.
        params["ref_audio_cache_key"] = speaker.clip.ref.audio_sha256
        if speaker.in_context:
            clip = speaker.clip
            num_frames = num_codec_frames(clip.num_samples, clip.sample_rate_hz)
            params["ref_code_length"] = [num_frames]
        return params
