"""A clone request on Higgs Audio v3 becomes token ids and a content address."""

import asyncio
from functools import cached_property
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.base import (
    PreparedRequest,
    resolve_stage_model_path,
)
from vllm_omni.entrypoints.openai.tts_adapters.higgs_audio_v3 import (
    HiggsAudioV3Adapter,
)
from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_tokenizer import (
    HiggsAudioV3TokenizerAdapter,
)

from vllm_tts_cache.entrypoints.serving.adapter import (
    SHORT_CHARS,
    Speaker,
    TextCheckingAdapter,
)
from vllm_tts_cache.families.higgs_audio_v3.family import FAMILY
from vllm_tts_cache.families.higgs_audio_v3.prompt import (
    PromptBuilder,
    num_reference_rows,
)
from vllm_tts_cache.speaker.reference import FIELD


class CachedHiggsAudioV3Adapter(TextCheckingAdapter, HiggsAudioV3Adapter):
    """The host's adapter; a clone's prompt names its codes, and begins with them."""

    tts_cache_family = FAMILY

    def tts_cache_check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would read as something else.

        Raises: InvalidSpeakerError.
        """
        self._builder.check_text(field, text)

    async def warmup(self) -> None:
        """Load the tokenizer, so that the first request does not."""
        await asyncio.to_thread(lambda: self._builder)

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Build a prompt with as many placeholders as the reference has rows.

        Raises: InvalidSpeakerError.
        """
        request, clip = speaker.request, speaker.clip

        def build() -> dict[str, Any]:
            return self._builder.clone(
                request.input,
                request.ref_text,
                ref=clip.ref,
                num_rows=num_reference_rows(clip.num_samples, clip.sample_rate_hz),
            )

        is_short = len(request.input) + len(request.ref_text or "") <= SHORT_CHARS
        prompt = build() if is_short else await self._service.texts.run(build)
        params = {FIELD: clip.ref.to_wire()}
        return PreparedRequest(prompt=prompt, tts_params=params, model_type=FAMILY.name)

    async def _resolve_higgs_audio_v3_adapter(self) -> HiggsAudioV3TokenizerAdapter:
        """Have text without a voice read by the tokenizer that is here already.

        The host would load another on the event loop, at the first such request.
        """
        return (await self._service.texts.run(lambda: self._builder)).hosts

    @cached_property
    def _builder(self) -> PromptBuilder:
        from transformers import AutoTokenizer

        engine_client: Any = self.ctx.engine_client
        model = resolve_stage_model_path(engine_client)
        # As the host loads it.
        return PromptBuilder(
            AutoTokenizer.from_pretrained(model, trust_remote_code=True)
        )
