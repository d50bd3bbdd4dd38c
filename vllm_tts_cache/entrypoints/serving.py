"""The host's speech serving class with its speaker side replaced."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from vllm.multimodal.media import MediaConnector
from vllm_omni.entrypoints.openai.serving_speech import OmniOpenAIServingSpeech

from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints import http_errors
from vllm_tts_cache.entrypoints.clone_request import (
    as_clone,
    clone_mode,
    refuse_embedding,
)
from vllm_tts_cache.entrypoints.first_chunk import after_first_chunk
from vllm_tts_cache.entrypoints.host_view import HostView, NoMemo, SpeakerNames
from vllm_tts_cache.entrypoints.request_speaker import (
    HEADER,
    RequestSpeaker,
    current_speaker,
    observe_outcomes,
    report,
    report_error,
)
from vllm_tts_cache.entrypoints.resolve import Clip, InlineClips, single_url
from vllm_tts_cache.entrypoints.service import Upload
from vllm_tts_cache.entrypoints.wiring import open_service
from vllm_tts_cache.errors import (
    EncodeError,
    SpeakerNotFoundError,
    SpeakerRequestError,
    TTSCacheError,
)
from vllm_tts_cache.speaker.family import Family

_DEFAULT_VOICE = "default"


class RefusedRequestError(ValueError):
    """What the host answers with 400 and logs in one line."""


class CachedServingSpeech(OmniOpenAIServingSpeech):
    """Speech requests whose speakers come from the registry, by content address."""

    _is_started = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._is_started = True

    # -------- what the host asks of its speaker storage

    def _restore_uploaded_speakers(self) -> None:
        """Open the storage; stock opens every stored file here."""
        settings = load_settings()
        # A pure diffusion model has no engine client, and no worker RPC.
        engine_client = getattr(self, "engine_client", None)
        self.speakers = open_service(
            settings, engine_client, family=lambda: self.served_family
        )
        self.uploaded_speakers = HostView(self.speakers.storage)  # type: ignore[assignment]
        self._ref_audio_data_url_cache = NoMemo()
        self._inline_clips = InlineClips(self.speakers.storage)

    def _get_available_speakers(self) -> Any:
        # The host lists all of them once, while it starts, for a line in its log.
        registered = self.uploaded_speakers if self._is_started else {}
        return SpeakerNames(self.builtin_names, registered)

    def _drop_shadowing_uploads(self) -> None:
        """Nothing to drop: a built-in name is looked up before a registered one."""

    def shutdown(self) -> None:
        """Release what the process holds; stock would go through all names."""
        storage, self.uploaded_speakers = self.speakers.storage, {}
        super().shutdown()
        storage.registry.close()

    @property
    def builtin_names(self) -> frozenset[str]:
        """Speakers that come with the checkpoint."""
        if (adapter := getattr(self, "_adapter", None)) is None:
            return frozenset()
        known = adapter.capabilities
        return frozenset(known.supported_speakers) | frozenset(
            known.precomputed_speakers
        )

    @property
    def served_family(self) -> Family | None:
        """The family of the model that is served; None if we do not own it."""
        if self._diffusion_mode:
            return None
        return getattr(self._get_tts_adapter(), "tts_cache_family", None)

    def check_upload(self, upload: Upload) -> None:
        """Refuse a transcript that no request could use.

        Raises: InvalidSpeakerError.
        """
        check = getattr(self._get_tts_adapter(), "tts_cache_check_text", None)
        if check is not None and upload.ref_text is not None:
            check("ref_text", upload.ref_text)

    # -------- requests

    def _validate_tts_request(self, request: Any) -> str | None:
        # A batch validates twice; the second time, while preparing, knows the speaker.
        return None if self._is_ours() else super()._validate_tts_request(request)

    async def create_speech(
        self, request: Any, raw_request: Request | None = None
    ) -> Any:
        """As stock, plus a header; a stream answers when its first audio is there."""
        with observe_outcomes() as outcomes:
            response = await super().create_speech(request, raw_request)
            if outcomes.error is not None:
                return http_errors.error_response(outcomes.error)
            if isinstance(response, StreamingResponse):
                response = await after_first_chunk(response)
            if isinstance(response, Response):
                response.headers[HEADER] = outcomes.header()
        return response

    async def _prepare_speech_generation(
        self, request: Any, *args: Any, **kwargs: Any
    ) -> tuple[str, Any, dict[str, Any]]:
        """Resolve the speaker; the host then sees a request that names none.

        Raises: RefusedRequestError for a 400; TTSCacheError for a 5xx.
        """
        try:
            return await self._prepare(request, *args, **kwargs)
        except SpeakerRequestError as exc:
            report_error(exc)
            raise RefusedRequestError(str(exc)) from exc
        except TTSCacheError as exc:
            report_error(exc)
            raise

    async def _prepare(
        self, request: Any, *args: Any, **kwargs: Any
    ) -> tuple[str, Any, dict[str, Any]]:
        if not self._is_ours():
            return await super()._prepare_speech_generation(request, *args, **kwargs)
        if (resolved := await self._resolve(request)) is None:
            report("none")
            return await super()._prepare_speech_generation(request, *args, **kwargs)
        try:
            return await self._prepare_resolved(*resolved, *args, **kwargs)
        except EncodeError:
            # The voice may have been replaced or deleted since it was looked up.
            now = await self._resolve(request)
            if now is None or now[0] == resolved[0]:
                raise
        return await self._prepare_resolved(*now, *args, **kwargs)

    async def _prepare_resolved(
        self, speaker: RequestSpeaker, request: Any, *args: Any, **kwargs: Any
    ) -> tuple[str, Any, dict[str, Any]]:
        token = current_speaker.set(speaker)
        sha = speaker.clip.ref.audio_sha256 if speaker.clip else None
        self.speakers.running.enter(sha)
        try:
            request_id, outputs, params = await super()._prepare_speech_generation(
                request, *args, **kwargs
            )
        except BaseException:
            self.speakers.running.leave(sha)
            raise
        finally:
            current_speaker.reset(token)
        return request_id, self._until_prefilled(outputs, sha), params

    async def _until_prefilled(
        self, outputs: AsyncIterator[Any], sha: str | None
    ) -> AsyncIterator[Any]:
        """Pass outputs on; with the first one the encodings are no longer needed."""
        needed = True
        try:
            # The first step hands the request to the engine, some milliseconds of the
            # host's on the event loop, right after as many to prepare it: others go
            # in between. Not before this generator has begun: one that is cancelled
            # before would never leave.
            await asyncio.sleep(0)
            async for output in outputs:
                if needed:
                    self.speakers.running.leave(sha)
                    needed = False
                yield output
        finally:
            if needed:
                self.speakers.running.leave(sha)
            if (close := getattr(outputs, "aclose", None)) is not None:
                await close()

    async def _resolve(self, request: Any) -> tuple[RequestSpeaker, Any] | None:
        """Return the speaker and the request without it; None if it names none."""
        if request.speaker_embedding is not None:
            refuse_embedding(self._family(), "speaker_embedding")
            return None
        if request.ref_audio is not None:
            return await self._inline(request)
        if request.voice is None or await self._is_preset(request):
            return None
        record = await self.speakers.find(request.voice)
        if record is None:
            raise SpeakerNotFoundError(request.voice)
        if (clip := Clip.of_record(record)) is not None:
            stored = record.ref_text
            mode = clone_mode(
                self._family(), request, stored_ref_text=stored, inline=False
            )
            return as_clone(request, clip, mode, stored_ref_text=stored)
        return await self._embedding(request, record)

    async def _inline(self, request: Any) -> tuple[RequestSpeaker, Any]:
        # First what costs nothing: a refused request fetches nothing.
        mode = clone_mode(self._family(), request, stored_ref_text=None, inline=True)
        url = single_url(request.ref_audio)
        clip = await self._inline_clips.resolve(url, self._connector())
        return as_clone(request, clip, mode, stored_ref_text=None)

    async def _embedding(
        self, request: Any, record: SpeakerRecord
    ) -> tuple[RequestSpeaker, Any]:
        refuse_embedding(self._family(), "voice")
        embedding = await asyncio.to_thread(
            self.speakers.storage.registry.speaker_embedding, record
        )
        values = list(embedding or ())
        changed = {"voice": None, "task_type": "Base", "speaker_embedding": values}
        speaker = RequestSpeaker(clip=None, in_context=False)
        report("none")
        return speaker, request.model_copy(update=changed)

    async def _is_preset(self, request: Any) -> bool:
        voice = request.voice.strip().lower()
        if voice in self.builtin_names:
            return True
        # The placeholder of OpenAI clients, unless somebody registered that name.
        return voice == _DEFAULT_VOICE and not await self.speakers.find(voice)

    def _is_ours(self) -> bool:
        return self.served_family is not None

    def _family(self) -> Family:
        family = self.served_family
        assert family is not None  # `_is_ours` comes first
        return family

    def _connector(self) -> MediaConnector:
        if self._media_connector is None:
            self._media_connector = MediaConnector(
                allowed_local_media_path=self.model_config.allowed_local_media_path,
                allowed_media_domains=self.model_config.allowed_media_domains,
            )
        return self._media_connector
