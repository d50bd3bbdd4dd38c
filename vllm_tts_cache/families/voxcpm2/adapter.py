"""A clone request on VoxCPM2 becomes token ids and a content address."""

import asyncio
from functools import cached_property
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest
from vllm_omni.entrypoints.openai.tts_adapters.voxcpm2 import VoxCPM2Adapter

from vllm_tts_cache.entrypoints.adapter import CachedAdapter, Speaker
from vllm_tts_cache.families.voxcpm2.family import FAMILY
from vllm_tts_cache.families.voxcpm2.positions import num_positions
from vllm_tts_cache.families.voxcpm2.prompt import PromptBuilder
from vllm_tts_cache.speaker.ref import FIELD

# A text is cut into tokens in microseconds; a long one would hold up the event loop.
_SHORT_CHARS = 2000


class CachedVoxCPM2Adapter(CachedAdapter, VoxCPM2Adapter):
    """The host's adapter; a clone's prompt names its encoding."""

    tts_cache_family = FAMILY

    def tts_cache_check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would read as something else.

        Raises: InvalidSpeakerError.
        """
        self._builder.check_text(field, text)

    async def check_texts(self, request: Any, *, has_own_ref_text: bool) -> None:
        """Refuse a control token in what is to be spoken and in its transcript.

        Raises: InvalidSpeakerError.
        """
        self._builder.check_text("input", request.input)
        if has_own_ref_text and request.ref_text is not None:
            self._builder.check_text("ref_text", request.ref_text)

    async def speak(
        self, request: Any, sampling_params_list: list[Any], has_inline_ref_audio: bool
    ) -> PreparedRequest:
        """As the host.

        Raises: InvalidSpeakerError.
        """
        self._builder.check_text("input", request.input)
        return await super().speak(request, sampling_params_list, has_inline_ref_audio)

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Build a prompt of placeholder ids, as long as the worker will make it."""
        request, clip = speaker.request, speaker.clip

        def build() -> dict[str, Any]:
            return self._builder.clone(
                request.input,
                request.ref_text,
                mode=speaker.mode,
                ref=clip.ref,
                num_positions=num_positions(clip.num_samples, clip.sample_rate_hz),
            )

        is_short = len(request.input) + len(request.ref_text or "") <= _SHORT_CHARS
        prompt = build() if is_short else await asyncio.to_thread(build)
        params = {FIELD: clip.ref.to_wire()}
        return PreparedRequest(prompt=prompt, tts_params=params, model_type=FAMILY.name)

    @cached_property
    def _builder(self) -> PromptBuilder:
        host: Any = self
        host._encode("")  # loads the tokenizer
        return PromptBuilder(host._tokenizer, host._split_map)
