"""What the adapters of several families share: they build prompts by a tokenizer."""

import asyncio
from abc import abstractmethod
from functools import cached_property, partial
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest

from vllm_tts_cache.entrypoints.serving.adapter import (
    SHORT_CHARS,
    Speaker,
    TextCheckingAdapter,
)
from vllm_tts_cache.speaker.reference import FIELD


class PromptAdapter(TextCheckingAdapter):
    """Builds clones' prompts with the family's prompt builder."""

    @cached_property
    @abstractmethod
    def _builder(self) -> Any:
        """The family's prompt builder; it loads the tokenizer.

        Its ``check_text(field, text)`` raises InvalidSpeakerError for a text that the
        model would read as something else. Its ``clone(text, transcript, mode=,
        clip=)`` takes texts that were checked, and returns the engine's prompt that
        speaks as the `Reference` does. One whose prompts hold codes has a ``clone`` of
        its own.
        """

    def tts_cache_check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would read as something else.

        Raises: InvalidSpeakerError.
        """
        self._builder.check_text(field, text)

    async def warmup(self) -> None:
        """Load the tokenizer before the first request, then as the host."""
        await asyncio.to_thread(lambda: self._builder)
        host: Any = super()
        await host.warmup()

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Build a prompt that holds no more of a reference than its length.

        In a thread, if its texts are long.

        Raises: InvalidSpeakerError.
        """
        request = speaker.request
        build = partial(
            self._builder.clone,
            request.input,
            request.ref_text,
            mode=speaker.mode,
            clip=speaker.clip,
        )
        num_chars = len(request.input or "") + len(request.ref_text or "")
        is_short = num_chars <= SHORT_CHARS
        prompt = build() if is_short else await self._service.texts.run(build)
        return self._prepared(speaker, prompt)

    def _prepared(self, speaker: Speaker, prompt: dict[str, Any]) -> PreparedRequest:
        return PreparedRequest(
            prompt=prompt,
            tts_params={FIELD: speaker.ref.to_wire()},
            model_type=self.tts_cache_family.name,
        )
