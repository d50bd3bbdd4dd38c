"""Speech of diffusion models, which the host serves by one method, without an adapter.

Our adapter resolves the speaker first, and the host sees a request that names none.
`PromptingEngine` adds the speaker's address to the prompt on its way to the engine.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_omni.diffusion import registry
from vllm_omni.entrypoints.openai.tts_adapters.base import (
    PreparedRequest,
    SpeechServingContext,
    TTSCapabilities,
)

from vllm_tts_cache.entrypoints.serving import host_speakers
from vllm_tts_cache.entrypoints.serving.adapter import CachedAdapter, Speaker
from vllm_tts_cache.speaker.checkpoint_dir import checkpoint_dir
from vllm_tts_cache.speaker.family import family_of_model
from vllm_tts_cache.speaker.reference import FIELD, REQUEST_FIELD

Submit = Callable[[Mapping[str, Any]], AsyncIterator[Any]]
Speak = Callable[[str, Submit], AsyncIterator[Any]]


class _NoHostsAdapter:
    """Replaces the host's adapter, which ours call: diffusion models have none."""

    # Empty: a diffusion model has no preset voices.
    capabilities = TTSCapabilities()

    def __init__(self, ctx: SpeechServingContext):
        self.ctx = ctx

    def validate(self, request: Any) -> str | None:
        """Return what is wrong with a request, before its speaker is resolved."""
        return None if request.input.strip() else "Input text cannot be empty"

    async def build(self, *_: Any) -> PreparedRequest:
        """Leave a prompt without reference audio as the host builds it."""
        return PreparedRequest(prompt={})


class DiffusionAdapter(CachedAdapter, _NoHostsAdapter):
    """Builds the fields of a clone's prompt that the host does not build."""

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Return the speaker's address, and the transcript if its mode uses one."""
        named: dict[str, Any] = {FIELD: speaker.clip.ref.to_wire()}
        if speaker.request.ref_text is not None:
            named["ref_text"] = self.tts_cache_transcript(speaker.request.ref_text)
        return PreparedRequest(prompt=named, model_type=self.tts_cache_family.name)

    def tts_cache_transcript(self, ref_text: str) -> str:
        """Return a transcript as the model is to read it; the base changes nothing."""
        return ref_text

    def _checkpoint(self) -> Path:
        return checkpoint_dir(self.ctx.diffusion_engine.model)


def adapter_of(server: Any, engine: Any) -> DiffusionAdapter | None:
    """Return the adapter of the model that is served; None if it is of no family."""
    if (family := family_of_model(_pipeline(engine))) is None:
        return None
    ctx = SpeechServingContext(server=server, diffusion_engine=engine)
    adapter: DiffusionAdapter = family.part("adapter")(ctx)
    return adapter


def other_model_of(engine: Any) -> host_speakers.OtherModel:
    """Describe the model that is served, which is of no family.

    Of the host's own pipelines only OmniVoice's reads the reference of a speech
    request; a pipeline of another plugin may.
    """
    if (name := _pipeline(engine)) in registry._DIFFUSION_MODELS:
        _, module_in_host, _ = registry._DIFFUSION_MODELS[name]
        if module_in_host:  # empty for what a plugin registered
            return host_speakers.OtherModel(name, takes_clips=False)
    return host_speakers.of_model(None)


def _pipeline(engine: Any) -> str | None:
    return getattr(engine.get_diffusion_od_config(), "model_class_name", None)


class PromptingEngine:
    """The host's engine client for one request, with more fields in its prompt.

    Args:
        engine: The host's engine client.
        speak: Called with the request's id, and a function that submits the request
            with the further fields that it is given.
    """

    def __init__(self, engine: Any, speak: Speak):
        self._engine = engine
        self._speak = speak

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, *, prompt: dict[str, Any], request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """Generate by ``speak``; the host's serving class passes all by name."""

        def submit(more: Mapping[str, Any]) -> AsyncIterator[Any]:
            whole = {**prompt, **more, REQUEST_FIELD: request_id}
            return self._engine.generate(prompt=whole, request_id=request_id, **options)

        return self._speak(request_id, submit)
