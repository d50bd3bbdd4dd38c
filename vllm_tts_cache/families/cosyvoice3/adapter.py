"""A clone request on CosyVoice3 becomes token ids and a content address."""

from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest
from vllm_omni.entrypoints.openai.tts_adapters.cosyvoice3 import CosyVoice3Adapter

from vllm_tts_cache.entrypoints.serving import adapter
from vllm_tts_cache.families.cosyvoice3 import prompt as prompts
from vllm_tts_cache.families.cosyvoice3.family import FAMILY, INSTRUCT
from vllm_tts_cache.families.networks.adapter import PromptAdapter
from vllm_tts_cache.speaker.family import CLONE_MODE, Mode
from vllm_tts_cache.store.speaker_store import StoredSpeaker


class CachedCosyVoice3Adapter(PromptAdapter, CosyVoice3Adapter):
    """The host's adapter; a clone's prompt names its encodings."""

    tts_cache_family = FAMILY
    tts_cache_needs_voice = True
    bounds_instructions = True
    _tokenizer: Any  # the host counts ids by it, and loads it at the first request

    async def _found(self, request: Any) -> StoredSpeaker | None:
        """Find as all adapters do; then instructions, also kept ones, choose a mode."""
        found = await super()._found(request)
        extra = request.extra_params or {}
        if (named := extra.get(CLONE_MODE)) == INSTRUCT.name:
            prompts.needed_instructions(request.instructions)
        elif named is None and (request.instructions or "").strip():
            request.extra_params = {**extra, CLONE_MODE: INSTRUCT.name}
        return found

    async def check_texts(self, request: Any, mode: Mode) -> prompts.Texts:
        """Refuse control tokens, and a second mark. Raises: InvalidSpeakerError."""
        await super().check_texts(request, mode)
        given = {"transcript": request.ref_text, "instructions": request.instructions}
        return prompts.texts_of(mode, request.input, **given)

    async def clone(self, speaker: adapter.Speaker) -> PreparedRequest:
        """Build a prompt with a placeholder id for each row that the worker makes."""
        texts, given = speaker.texts, {"mode": speaker.mode, "clip": speaker.clip}
        build = partial(self._builder.clone, texts, **given)
        is_short = len(texts.prompt) + len(texts.spoken) <= adapter.SHORT_CHARS
        prompt = build() if is_short else await self._service.texts.run(build)
        return self._prepared(speaker, prompt)

    def apply_sampling_overrides(
        self,
        sampling_params_list: list[Any],
        request: Any,
        prompt: dict[str, Any] | None = None,
        request_id: str | None = None,
    ) -> list[Any]:
        """Override as the host does, with the ids of the prompt's spoken text.

        The host would tokenize the request's text again, on the event loop.
        """
        _, spoken = (prompt or {})["additional_information"][prompts.TEXT_IDS]
        self._tokenizer = SimpleNamespace(encode=lambda *_, **__: spoken)
        host: Any = super()
        given = sampling_params_list, request, prompt, request_id
        return host.apply_sampling_overrides(*given)

    @cached_property
    def _builder(self) -> prompts.PromptBuilder:
        engine_client: Any = self.ctx.engine_client
        model = engine_client.model_config
        tokenizer = prompts.load_tokenizer(model.model, model.revision, model.hf_config)
        return prompts.PromptBuilder(tokenizer)
