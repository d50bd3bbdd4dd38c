"""The default voice, and a hint where a model's name is not known."""

from typing import Any

from vllm_tts_cache.catalogue.names import PLACEHOLDER
from vllm_tts_cache.entrypoints.serving.serving import CachedServingSpeech
from vllm_tts_cache.tenants import is_speaking, speaking_tenant


class Speech(CachedServingSpeech):
    """Speech in which the default voice speaks where a request names nobody."""

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
