"""A clone request on VoxCPM2 becomes token ids and a content address."""

from functools import cached_property
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest
from vllm_omni.entrypoints.openai.tts_adapters.voxcpm2 import VoxCPM2Adapter

from vllm_tts_cache.entrypoints.serving.adapter import (
    SHORT_CHARS,
    Speaker,
    TextCheckingAdapter,
)
from vllm_tts_cache.families.voxcpm2.family import FAMILY
from vllm_tts_cache.families.voxcpm2.positions import num_positions
from vllm_tts_cache.families.voxcpm2.prompt import PromptBuilder
from vllm_tts_cache.speaker.reference import FIELD


class CachedVoxCPM2Adapter(TextCheckingAdapter, VoxCPM2Adapter):
    """The host's adapter; a clone's prompt names its encoding."""

    tts_cache_family = FAMILY

    def tts_cache_check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would read as something else.

        Raises: InvalidSpeakerError.
        """
        self._builder.check_text(field, text)

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

        is_short = len(request.input) + len(request.ref_text or "") <= SHORT_CHARS
        prompt = build() if is_short else await self._service.texts.run(build)
        params = {FIELD: clip.ref.to_wire()}
        return PreparedRequest(prompt=prompt, tts_params=params, model_type=FAMILY.name)

    @cached_property
    def _builder(self) -> PromptBuilder:
        host: Any = self
        host._encode("")  # loads the tokenizer
        return PromptBuilder(host._tokenizer, host._split_map)
