"""The base of those families' adapters that build prompts with a tokenizer."""

import asyncio
from functools import cached_property, partial
from typing import Any, ClassVar

from vllm_omni.entrypoints.openai.tts_adapters.base import (
    PreparedRequest,
    resolve_stage_model_path,
)

from vllm_tts_cache.entrypoints.serving import adapter
from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.networks.prompts import PromptBuilder
from vllm_tts_cache.speaker.reference import FIELD


class PromptAdapter(adapter.CachedAdapter):
    """Builds clones' prompts with the family's prompt builder.

    Attributes:
        prompt_builder: The builder's class, unless the family overrides `_builder`.
        bounds_instructions: Whether they are bounded here; the host does not.
    """

    prompt_builder: ClassVar[type[PromptBuilder]]
    bounds_instructions: ClassVar[bool] = False

    @cached_property
    def _builder(self) -> Any:
        """The family's prompt builder; its first use loads the tokenizer.

        ``check_text(field, text)`` raises InvalidSpeakerError for a text that the model
        would misread. ``clone(text, transcript, mode=, clip=)`` takes checked texts and
        returns the engine's prompt in the voice of ``clip``, a `Reference`. A builder
        whose prompts hold codes takes other arguments; its adapter overrides `clone`.
        """
        engine_client: Any = self.ctx.engine_client
        # Not with the host's processor, which on Higgs Audio v2 loads the audio
        # tokenizer too.
        return self.prompt_builder.of(resolve_stage_model_path(engine_client))

    def validate(self, request: Any) -> str | None:
        """Validate as all adapters do; bound instructions by the host's own setting."""
        try:
            self._check_length(request)
        except InvalidSpeakerError as exc:
            return str(exc)
        return super().validate(request)

    def tts_cache_check(self, seen: Any) -> None:
        """Check as all adapters do, also instructions that are kept with the voice."""
        self._check_length(seen)
        super().tts_cache_check(seen)

    def _check_length(self, request: Any) -> None:
        length = len(request.instructions or "") if self.bounds_instructions else 0
        if length > (limit := self.ctx.server._max_instructions_length):
            reason = f"they have {length} characters; give at most {limit}"
            raise InvalidSpeakerError("instructions", reason)

    def tts_cache_check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would misread. Raises: InvalidSpeakerError."""
        self._builder.check_text(field, text)

    async def warmup(self) -> None:
        """Load the tokenizer before the first request, then warm up as the host."""
        await asyncio.to_thread(lambda: self._builder)
        host: Any = super()
        await host.warmup()

    async def clone(self, speaker: adapter.Speaker) -> PreparedRequest:
        """Build a prompt with placeholders in place of the reference's codes.

        A thread builds it if the texts are longer than `SHORT_CHARS`.

        Raises: InvalidSpeakerError.
        """
        request = speaker.request
        texts, clone = (request.input, request.ref_text), self._builder.clone
        build = partial(clone, *texts, mode=speaker.mode, clip=speaker.clip)
        is_short = sum(len(text or "") for text in texts) <= adapter.SHORT_CHARS
        prompt = build() if is_short else await self._service.texts.run(build)
        return self._prepared(speaker, prompt)

    def _prepared(
        self, speaker: adapter.Speaker, prompt: dict[str, Any]
    ) -> PreparedRequest:
        family, params = self.tts_cache_family.name, {FIELD: speaker.clip.ref.to_wire()}
        return PreparedRequest(prompt=prompt, tts_params=params, model_type=family)
