"""A clone request on Qwen3-TTS becomes text and a content address."""

from collections.abc import Mapping
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.base import (
    PreparedRequest,
    conditioning_cache_salt,
)
from vllm_omni.entrypoints.openai.tts_adapters.qwen3_tts import Qwen3TTSAdapter

from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.entrypoints.serving.adapter import CachedAdapter, Speaker
from vllm_tts_cache.families.networks.prompts import engine_prompt
from vllm_tts_cache.families.networks.qwen3_codec.frames import num_codec_frames
from vllm_tts_cache.families.qwen3_tts.family import FAMILY, HANDED_ON, IN_CONTEXT
from vllm_tts_cache.speaker.reference import FIELD


class CachedQwen3TTSAdapter(CachedAdapter, Qwen3TTSAdapter):
    """The host's adapter; a clone's prompt names the encodings."""

    tts_cache_family = FAMILY
    tts_cache_needs_voice = True  # a Base checkpoint: others clone no voices

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Build a prompt with a placeholder id for each row that the worker makes."""
        host: Any = self  # its registering decorator hides the class from checkers
        clip = speaker.clip
        params = host._build_tts_params(speaker.request)
        params[FIELD] = clip.ref.to_wire()
        # The host folds this field into the salt of its prefix cache.
        params["ref_audio_cache_key"] = clip.ref.audio_sha256
        if speaker.mode is IN_CONTEXT:
            num_frames = num_codec_frames(clip.num_samples, clip.sample_rate_hz)
            params["ref_code_length"] = [num_frames]
            if clip.ref.segment is Segment.REGISTERED:
                params[HANDED_ON] = [clip.ref.audio_sha256]
        num_tokens = await host._estimate_prompt_len_async(params)
        salt = _salt_of(conditioning_cache_salt(speaker.request, params), params)
        prompt = engine_prompt([1] * num_tokens, params, salt)
        return PreparedRequest(prompt=prompt, tts_params=params, model_type="Base")

    async def speak(self, request: Any, *others: Any) -> PreparedRequest:
        """Build as the host, with a salt that names all that shapes the prompt."""
        prepared = await super().speak(request, *others)
        if (salt := prepared.prompt.get("cache_salt")) is not None:
            prepared.prompt["cache_salt"] = _salt_of(salt, prepared.tts_params)
        return prepared


def _salt_of(hosts: str, params: Mapping[str, Any]) -> str:
    """Add to the host's salt how the text is fed, which shapes the prompt as well.

    The ids are placeholders, so two prompts with one salt share their KV.
    """
    return f"{hosts} {params.get('non_streaming_mode')}"
