"""A clone request on CosyVoice3 becomes token ids and a content address."""

import asyncio
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest
from vllm_omni.entrypoints.openai.tts_adapters.cosyvoice3 import CosyVoice3Adapter

from vllm_tts_cache.entrypoints.serving.adapter import (
    SHORT_CHARS,
    CachedAdapter,
    Speaker,
)
from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.cosyvoice3.family import FAMILY, INSTRUCT
from vllm_tts_cache.families.cosyvoice3.prompt import (
    TEXT_IDS,
    PromptBuilder,
    needed_instructions,
    texts_of,
)
from vllm_tts_cache.families.cosyvoice3.text import load_tokenizer
from vllm_tts_cache.speaker.family import CLONE_MODE
from vllm_tts_cache.speaker.reference import FIELD


class CachedCosyVoice3Adapter(CachedAdapter, CosyVoice3Adapter):
    """The host's adapter; a clone's prompt names its encodings."""

    tts_cache_family = FAMILY
    tts_cache_needs_voice = True
    _tokenizer: Any  # the host counts by it, and makes it at the first request

    async def warmup(self) -> None:
        """Load the tokenizer, so that the first request does not."""
        await asyncio.to_thread(lambda: self._builder)

    def validate(self, request: Any) -> str | None:
        """As every family; instructions are as long as the host lets any model's be."""
        limit = self.ctx.server._max_instructions_length
        if (length := len(request.instructions or "")) > limit:
            reason = f"give at most {limit} characters; these are {length}"
            return str(InvalidSpeakerError("instructions", reason))
        return super().validate(request)

    async def build(
        self, request: Any, sampling_params_list: list[Any], has_inline_ref_audio: bool
    ) -> PreparedRequest:
        """As every family; instructions choose the mode that follows them.

        Raises: SpeakerRequestError, ServerFaultError.
        """
        extra = request.extra_params or {}
        if (named := extra.get(CLONE_MODE)) == INSTRUCT.name:
            needed_instructions(request.instructions)  # before a clip is fetched
        elif named is None and (request.instructions or "").strip():
            request.extra_params = {**extra, CLONE_MODE: INSTRUCT.name}
        return await super().build(request, sampling_params_list, has_inline_ref_audio)

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Build a prompt of placeholder ids, as long as the worker will make it.

        Raises: InvalidSpeakerError.
        """
        request = speaker.request
        texts = texts_of(
            speaker.mode,
            request.input,
            transcript=request.ref_text,
            instructions=request.instructions,
        )
        build = partial(
            self._builder.clone, texts, mode=speaker.mode, clip=speaker.clip
        )
        is_short = len(texts.prompt) + len(texts.spoken) <= SHORT_CHARS
        prompt = build() if is_short else await self._service.texts.run(build)
        params = {FIELD: speaker.ref.to_wire()}
        return PreparedRequest(prompt=prompt, tts_params=params, model_type=FAMILY.name)

    def apply_sampling_overrides(
        self,
        sampling_params_list: list[Any],
        request: Any,
        prompt: dict[str, Any] | None = None,
        request_id: str | None = None,
    ) -> list[Any]:
        """As the host, by the ids of all that is said.

        The host makes them anew of the request's text, on the event loop.
        """
        _, spoken = (prompt or {})["additional_information"][TEXT_IDS]
        self._tokenizer = _Known(spoken)
        host: Any = super()
        return host.apply_sampling_overrides(
            sampling_params_list, request, prompt, request_id
        )

    @cached_property
    def _builder(self) -> PromptBuilder:
        engine_client: Any = self.ctx.engine_client
        model = engine_client.model_config
        tokenizer = load_tokenizer(model.model, model.revision, model.hf_config)
        return PromptBuilder(tokenizer)


@dataclass(frozen=True, slots=True)
class _Known:
    """Stands for the tokenizer where the host would count the ids of a text."""

    ids: list[int]

    def encode(self, _text: str, **_: Any) -> list[int]:
        return self.ids
