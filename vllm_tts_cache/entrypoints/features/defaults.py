"""The default voice, and a voice's settings: what speaks where a request is open."""

from typing import Any

import numpy as np

from vllm_tts_cache.catalogue.names import PLACEHOLDER
from vllm_tts_cache.entrypoints.serving import request_speaker, serving
from vllm_tts_cache.errors import InvalidSpeakerError, SpeakerRequestError
from vllm_tts_cache.tenants import is_speaking, speaking_tenant

_FIELDS = ("language", "instructions", "seed")
_OPTIONS = ("temperature", "clone_mode")


def act(request: Any, kept: dict[str, Any]) -> None:
    """Set what the request leaves open to a voice's settings.

    Of batches and WebSockets the host makes requests of its own class that say a speed
    of 1 where nobody did.
    """
    for name in _FIELDS:
        if name in kept and getattr(request, name) in (None, ""):
            setattr(request, name, kept[name])
    says = type(request) is not serving.OpenAICreateSpeechRequest
    says = says and "speed" in request.model_fields_set
    if "speed" in kept and not says and request.speed in (None, 1.0):
        request.speed = kept["speed"]
    options = {name: kept[name] for name in _OPTIONS if name in kept}
    if request.x_vector_only_mode is not None:
        options.pop("clone_mode", None)
    if options:
        request.extra_params = {**options, **(request.extra_params or {})}


request_speaker.ACTING["settings"] = act


class Speech(serving.CachedServingSpeech):
    """Speech by the default voice where a request names none, and with settings."""

    async def create_speech_batch(self, batch_request: Any) -> Any:
        """Speak as the host does."""
        if not self._diffusion_mode:
            for item in batch_request.items[: self._batch_max_items]:
                self._name_default(item, batch_request)
        return await super().create_speech_batch(batch_request)

    async def _prepare_speech_generation(
        self, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._name_default(request)
        return await super()._prepare_speech_generation(request, *args, **kwargs)

    async def _create_diffusion_speech(self, request: Any) -> Any:
        self._name_default(request)
        return await super()._create_diffusion_speech(request)

    def _name_default(self, request: Any, batch: Any = None) -> None:
        """Name the default voice, if there is one, in a request that names nobody.

        An item of a batch speaks with the speaker of the batch if it names none.
        """
        if not is_speaking():  # a request of the server's own
            return
        for each in filter(None, (request, batch)):
            named = (each.voice or "").strip().lower()
            is_none = named in ("", PLACEHOLDER)
            others = each.ref_audio, getattr(each, "speaker_embedding", None)
            if not is_none or named in self.builtin_names or others != (None, None):
                if each is batch:  # the host would take the placeholder for a voice
                    request.voice = None
                return
        tenant = speaking_tenant(self.speakers.tenants)
        request.voice = self.speakers.default_voice(tenant.name) or request.voice

    async def _check_model(self, request: Any) -> Any:
        error: Any = await super()._check_model(request)
        if error is not None:
            error.error.message += (
                " GET /v1/models lists the names that this server answers to; "
                "`vllm serve MODEL --omni --served-model-name tts-1 gpt-4o-mini-tts` "
                "gives it others."
            )
        return error

    def create_audio(self, audio_obj: Any) -> Any:
        """Make a file, as loud as the voice is to be."""
        speaking = request_speaker.SPEAKING.get()
        record = None if speaking is None else speaking.record
        kept = {} if record is None else record.extras.get("settings") or {}
        if gain_db := kept.get("gain_db"):
            louder = np.asarray(audio_obj.audio_tensor) * 10 ** (gain_db / 20)
            audio_obj.audio_tensor = np.clip(louder, -1.0, 1.0).astype(np.float32)
        return super().create_audio(audio_obj)

    def check_fields(self, given: Any) -> None:
        """Refuse settings that the model cannot use. Raises: InvalidSpeakerError."""
        super().check_fields(given)
        adapter, kept = self.cached_adapter, given.get("settings")
        if not kept or adapter is None or not adapter.tts_cache_clones:
            return
        asked = serving.OpenAICreateSpeechRequest(input="A.", ref_text="A.", voice="v")
        act(asked, kept)
        facts = request_speaker.clone_facts(
            asked, stored_ref_text=None, is_inline=False
        )
        try:
            mode = adapter.tts_cache_family.mode(facts)
            seen = request_speaker.as_clone(asked, mode, stored_ref_text=None)
            adapter.tts_cache_check(seen)
            for field in adapter.tts_cache_checked:
                adapter.tts_cache_check_text(field, kept.get(field) or "")
        except SpeakerRequestError as exc:
            raise InvalidSpeakerError("settings", str(exc)) from exc
