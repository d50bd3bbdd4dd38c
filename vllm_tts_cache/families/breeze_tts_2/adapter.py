"""A clone request on Breeze-TTS-2 becomes text and a content address."""

import asyncio
from functools import cached_property
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest
from vllm_omni.entrypoints.openai.tts_adapters.breeze_tts_2 import BreezeTTS2Adapter

from vllm_tts_cache.entrypoints.adapter import Speaker
from vllm_tts_cache.entrypoints.checked_texts import TextCheckingAdapter
from vllm_tts_cache.families.breeze_tts_2.family import FAMILY
from vllm_tts_cache.families.breeze_tts_2.prompt import (
    by_address,
    check_text,
    control_tokens,
    silence,
)

# What the host takes a voice for: who speaks, in the words of the prompt.
_LABELS = tuple(f"s{number}" for number in range(10))


class CachedBreezeTTS2Adapter(TextCheckingAdapter, BreezeTTS2Adapter):
    """The host's adapter; a clone's prompt names its codes.

    The host reads no registered voice: to it a voice is a label. Here ``S0`` to ``S9``
    still are, and are listed as the model's own.
    """

    tts_cache_family = FAMILY

    def tts_cache_check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would read as something else.

        Raises: InvalidSpeakerError.
        """
        check_text(self._control_tokens, field, text)

    async def warmup(self) -> None:
        """Load the tokenizer before the first request, then as the host."""
        await asyncio.to_thread(lambda: self._control_tokens)
        await super().warmup()

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Build the host's prompt for a clip of this length."""
        host: Any = self  # its registering decorator hides the class from checkers
        clip = speaker.clip
        sampling = host.ctx.engine_client.default_sampling_params_list[0]
        prompt = await host._build_async(
            speaker.request, sampling, silence(clip.num_samples, clip.sample_rate_hz)
        )
        return PreparedRequest(
            prompt=by_address(prompt, clip.ref), model_type=FAMILY.name
        )

    def _load_supported_speakers(self) -> list[str]:
        return list(_LABELS)

    @cached_property
    def _control_tokens(self) -> list[str]:
        from transformers import AutoTokenizer

        host: Any = self
        if host.tokenizer is None:  # it is loaded where a prompt is built, too late
            config = host.ctx.engine_client.model_config
            host.tokenizer = AutoTokenizer.from_pretrained(
                config.model, config=config.hf_config
            )
        return control_tokens(host.tokenizer)
