"""Speech of diffusion models, which the host serves by one method, without an adapter.

An adapter of ours resolves the speaker before; the host sees a request that names none;
what names the speaker to the worker is put into the prompt on its way to the engine.
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
from vllm_tts_cache.speaker.family import family_of_pipeline
from vllm_tts_cache.speaker.reference import FIELD, REQUEST_FIELD

Submit = Callable[[Mapping[str, Any]], AsyncIterator[Any]]
Speak = Callable[[str, Submit], AsyncIterator[Any]]

_WHOLE = (
    "This model speaks a text whole and not in parts, so there are no events to send: "
    "leave out stream and stream_format, or ask for stream_format='audio', which "
    "answers all of it at once."
)


class _NoHostsAdapter:
    """What our adapters call of the host's, for models of which it has none."""

    # Of the model, and not of the operator: there are no presets.
    capabilities = TTSCapabilities()

    def __init__(self, ctx: SpeechServingContext):
        self.ctx = ctx

    def validate(self, request: Any) -> str | None:
        """Say what is wrong before anything is spent on a clone, or None."""
        return None if request.input.strip() else "Input text cannot be empty"

    async def build(
        self,
        request: Any,  # noqa: ARG002  the host builds its prompt
        sampling_params_list: list[Any],  # noqa: ARG002
        has_inline_ref_audio: bool,  # noqa: ARG002
    ) -> PreparedRequest:
        """Leave the prompt of a request without reference audio as it is."""
        return PreparedRequest(prompt={})


class DiffusionAdapter(CachedAdapter, _NoHostsAdapter):
    """Says what goes into a clone's prompt beside what the host puts there."""

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Name the speaker, and give the transcript that goes with its encodings."""
        named: dict[str, Any] = {FIELD: speaker.ref.to_wire()}
        if speaker.request.ref_text is not None:
            named["ref_text"] = self.tts_cache_transcript(speaker.request.ref_text)
        return PreparedRequest(prompt=named, model_type=self.tts_cache_family.name)

    def tts_cache_transcript(self, ref_text: str) -> str:
        """Return a transcript as the model is to read it: here as it is."""
        return ref_text

    def validate(self, request: Any) -> str | None:
        """As our other adapters; a stream of events, which is none here, is refused."""
        return _WHOLE if request.is_sse_stream() else super().validate(request)

    def _checkpoint(self) -> Path:
        return checkpoint_dir(self.ctx.diffusion_engine.model)


def adapter_of(server: Any, engine: Any) -> DiffusionAdapter | None:
    """Return the adapter of the model that is served; None if it is of no family."""
    if (family := family_of_pipeline(_pipeline(engine))) is None:
        return None
    ctx = SpeechServingContext(server=server, diffusion_engine=engine)
    adapter: DiffusionAdapter = family.part("adapter")(ctx)
    return adapter


def other_model_of(engine: Any) -> host_speakers.OtherModel:
    """Describe the model that is served, which is of no family.

    None of the host's own pipelines but OmniVoice's reads the reference of a speech
    request; one that another plugin brought may.
    """
    if (name := _pipeline(engine)) in registry._DIFFUSION_MODELS:
        _, module_in_host, _ = registry._DIFFUSION_MODELS[name]
        if module_in_host:  # empty of what a plugin registered
            return host_speakers.OtherModel(name, takes_clips=False)
    return host_speakers.of_model(None)


def _pipeline(engine: Any) -> str | None:
    return getattr(engine.get_diffusion_od_config(), "model_class_name", None)


class PromptingEngine:
    """The host's engine client for one request, whose prompt is added to.

    Args:
        engine: The host's.
        speak: Is given the request's id, and what submits it with more in its prompt.
    """

    def __init__(self, engine: Any, speak: Speak):
        self._engine = engine
        self._speak = speak

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, *, prompt: dict[str, Any], request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """As the host's, whose serving class gives all by name."""

        def submit(more: Mapping[str, Any]) -> AsyncIterator[Any]:
            whole = {**prompt, **more, REQUEST_FIELD: request_id}
            return self._engine.generate(prompt=whole, request_id=request_id, **options)

        return self._speak(request_id, submit)
