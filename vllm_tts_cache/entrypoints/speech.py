"""The host's speech serving class with its speaker side replaced."""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from vllm.v1.engine.exceptions import EngineGenerateError
from vllm_omni.errors import OmniClientError

from vllm_tts_cache.catalogue.names import fold
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints import diffusion, host_speakers
from vllm_tts_cache.entrypoints.callers import KnowsTenants, speaking_tenant
from vllm_tts_cache.entrypoints.host_speakers import (
    NOBODY,
    HostView,
    HostVoice,
    NoMemo,
    SpeakerNames,
)
from vllm_tts_cache.entrypoints.hosted_model import KnowsItsModel
from vllm_tts_cache.entrypoints.kv_prefill import VoicePrefill
from vllm_tts_cache.entrypoints.metrics.series import process_metrics
from vllm_tts_cache.entrypoints.request_speaker import (
    report_error,
    without_speaker,
)
from vllm_tts_cache.entrypoints.routing import bounded_error_response, status_of
from vllm_tts_cache.entrypoints.sampling import check_sampling
from vllm_tts_cache.entrypoints.served_model import ServedModel
from vllm_tts_cache.entrypoints.service import open_service
from vllm_tts_cache.entrypoints.tenant_keys import TenantKeys
from vllm_tts_cache.errors import (
    EncodeError,
    InvalidSpeakerError,
    SpeakerRequestError,
    StorageError,
    TTSCacheError,
)
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.throttled_log import ThrottledLog

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

# Where a voice is replaced again and again, each new prompt may be lost as well.
MAX_SUBMITS = 3

T = TypeVar("T")
Prepared = tuple[str, Any, dict[str, Any]]


class RefusedRequestError(ValueError):
    """What the host logs in one line; the route answers the error behind it."""


class CachedServingSpeech(KnowsTenants, KnowsItsModel):
    """Speech requests whose speakers come from the catalogue, by content address."""

    _is_started = False
    create_error_response = staticmethod(bounded_error_response)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._start()

    @classmethod
    def for_diffusion(cls, *args: Any, **kwargs: Any) -> "CachedServingSpeech":
        """As the host, which leaves `__init__` out for a diffusion model."""
        speech: Any = super().for_diffusion(*args, **kwargs)
        engine = speech._diffusion_engine
        speech._diffusion_adapter = diffusion.adapter_of(speech, engine)
        speech._diffusion_engine = diffusion.PromptingEngine(engine)
        speech._start()
        return speech

    def _start(self) -> None:
        self._is_started = True
        self.media_connector.connection = self.speakers.connection
        if (adapter := self.cached_adapter) is not None:
            process_metrics().begin_family(adapter.tts_cache_family.name)
        if self.served_family is not None or self.refusal is not None:
            # Registered voices are found where the prompt is built: the host, which
            # asks before that for each request, need know no more than the presets.
            self._get_available_speakers = self.builtin_names.copy

    # -------- what the host asks of its speaker storage

    def _restore_uploaded_speakers(self) -> None:
        """Open the storage; stock opens every stored file here."""
        is_diffusion = self._diffusion_mode
        engine: Any = self._diffusion_engine if is_diffusion else self.engine_client
        settings = load_settings()
        keeps_states = settings.decoder_max_bytes > 0
        self.speakers = open_service(
            settings,
            engine,
            ServedModel(
                family=lambda: self.served_family,
                refusal=lambda: self.refusal,
                note=lambda: self.other_model.note(self._get_tts_adapter()),
            ),
            prefill=VoicePrefill(self, keeps_states=keeps_states),
        )
        self.speakers.start()
        view = HostView(self.speakers.store, self._tenant_name)
        self.uploaded_speakers = view  # type: ignore[assignment]
        self._ref_audio_data_url_cache = NoMemo()

    def _get_available_speakers(self) -> Any:
        # The host lists all of them once, while it starts, for a line in its log.
        registered = self.uploaded_speakers if self._is_started else {}
        return SpeakerNames(self.builtin_names, registered)

    def _drop_shadowing_uploads(self) -> None:
        """Nothing to delete: a built-in name is looked up before a registered one."""

    def _load_uploaded_audio(self, voice_name: str) -> tuple[Any, int] | None:
        """Read a voice's audio in our form, for families that we do not serve."""
        try:
            return host_speakers.load_audio(
                self.speakers.store, voice_name, self._tenant_name
            )
        except StorageError as exc:
            throttled.warn_of("reading a voice", "Reading a voice: %s", exc.log_text)
            return None

    def _get_uploaded_speaker_embedding(self, voice_name: str) -> list[float] | None:
        """Read a voice's raw embedding, for families that we do not serve."""
        return host_speakers.load_embedding(
            self.speakers.store, voice_name, self._tenant_name
        )

    def _tenant_name(self) -> str:
        return speaking_tenant(self.tenants).name

    def shutdown(self) -> None:
        """Close what the process holds; stock would go through all names."""
        self.uploaded_speakers = {}
        super().shutdown()
        self.speakers.shutdown()

    @property
    def tenants(self) -> TenantKeys:
        """Whose API keys are whose."""
        return self.speakers.tenants

    # -------- requests

    async def create_speech_batch(self, batch_request: Any) -> Any:
        """As the host, which asks for the voices of all items before any is spoken."""
        if self._diffusion_mode:  # which has no batches
            return await super().create_speech_batch(batch_request)
        named = [batch_request, *batch_request.items[: self._batch_max_items]]
        with host_speakers.known(await self._read_for_host(*named)):
            return await super().create_speech_batch(batch_request)

    async def _read_for_host(self, *requests: Any) -> dict[str, HostVoice]:
        """Read the voices that requests name, by their folded names.

        The host asks for them on the event loop; of a model of ours it may ask for
        presets alone.
        """
        names = {fold(r.voice): r.voice for r in requests if r.voice is not None}
        if self.served_family is not None:
            return dict.fromkeys(names, NOBODY)
        return {key: await self._read_voice(name) for key, name in names.items()}

    async def _read_voice(self, name: str) -> HostVoice:
        try:
            if (known := host_speakers.told_of(name)) is not None:  # of a batch
                return known
            tenant = speaking_tenant(self.tenants)
            if (found := await self.speakers.lookups.find(tenant, name)) is None:
                return NOBODY
            read = host_speakers.read_voice
            return await self.speakers.lookups.reads.run(
                read, self.speakers.store, found
            )
        except TTSCacheError as exc:
            return HostVoice(error=exc)

    async def _prepare_speech_generation(
        self,
        request: Any,
        request_id: str | None = None,
        has_inline_ref_audio: bool | None = None,
        arrival_time: float | None = None,
    ) -> Prepared:
        """As the host; a request whose prompt is lost in the engine goes there again.

        Raises: RefusedRequestError where a route of ours listens; else TTSCacheError.
        """
        self.speakers.kv_warming.give_way()
        # The same id for both: it is how the client's request is aborted.
        prepare = functools.partial(
            super()._prepare_speech_generation,
            request,
            has_inline_ref_audio=has_inline_ref_audio,
            arrival_time=arrival_time,
        )
        try:
            check_sampling(request.extra_params)
        except InvalidSpeakerError as exc:
            raise _as_told(exc) from exc
        with host_speakers.known(await self._read_for_host(request)):
            prepared = await _told(prepare(request_id=request_id))
        request_id, outputs, params = prepared
        if (ref := SpeakerRef.from_info(params)) is None:
            return prepared
        self.speakers.kv_warming.delete(ref.audio_sha256)

        async def again() -> AsyncIterator[Any]:
            nonlocal ref
            self._doubt(ref)
            _, outputs, params = await _told(prepare(request_id=request_id))
            ref = SpeakerRef.from_info(params)  # another one, if it was replaced
            # The host took this before the first output, and will not again.
            self._speech_output_policies.pop(request_id, None)
            return outputs

        begun = self._until_begun(
            request_id, outputs, again, lambda: self._check_stays(request, ref)
        )
        return request_id, begun, params

    async def _create_diffusion_speech(self, request: Any) -> Any:
        """As the host, with a speaker that the prompt names by content address."""
        host = super()._create_diffusion_speech
        if (adapter := self._diffusion_adapter) is None:
            with host_speakers.known(await self._read_for_host(request)):
                return await host(request)
        build = functools.partial(
            adapter.build, request, [], request.ref_audio is not None
        )
        try:
            if (problem := adapter.validate(request)) is not None:
                raise SpeakerRequestError(problem)
            named = (await build()).prompt
        except asyncio.CancelledError:  # as the host: its route counts what it answers
            return self._diffusion_error_response("Client disconnected")
        except TTSCacheError as exc:
            report_error(exc)
            return self._diffusion_error_response(str(exc), status_of(exc))
        if (ref := SpeakerRef.from_info(named)) is None:
            return await host(request)

        def speak(request_id: str, submit: diffusion.Submit) -> AsyncIterator[Any]:
            async def again() -> AsyncIterator[Any]:
                nonlocal ref
                self._doubt(ref)
                prompt = (await _told(build())).prompt
                ref = SpeakerRef.from_info(prompt)  # another one, if it was replaced
                return submit(prompt)

            return self._until_begun(
                request_id,
                submit(named),
                again,
                lambda: self._check_stays(request, ref),
            )

        with diffusion.spoken_by(speak):
            return await host(without_speaker(request))

    def _doubt(self, ref: SpeakerRef | None) -> None:
        if ref is not None:
            self.speakers.encodings.ensurer.doubt(ref.audio_sha256)

    async def _check_stays(self, request: Any, ref: SpeakerRef | None) -> None:
        """See that the voice of a request is the one that it was last submitted with.

        Raises: SpeakerNotFoundError, SpeakerReplacedError, StorageError.
        """
        if ref is not None and request.ref_audio is None:
            tenant, sha = speaking_tenant(self.tenants), ref.audio_sha256
            await self.speakers.lookups.check_stays(tenant, request.voice, sha)

    async def _until_begun(
        self,
        request_id: str,
        outputs: AsyncIterator[Any],
        again: Callable[[], Awaitable[AsyncIterator[Any]]],
        stays: Callable[[], Awaitable[None]],
    ) -> AsyncIterator[Any]:
        """Pass outputs on; without any, for want of the prompt, submit anew."""
        for num_left in reversed(range(MAX_SUBMITS)):
            has_begun = False
            # A prefill may have begun while this one's speaker was encoded.
            self.speakers.kv_warming.give_way()
            # The first step hands the request to the engine, some milliseconds of the
            # host's on the event loop, right after as many to prepare it: others go
            # first, and that prefill's end.
            await asyncio.sleep(0)
            try:
                async for output in outputs:
                    has_begun = True
                    yield output
                return
            # The last is a diffusion model's that computes a step at a time.
            except (EngineGenerateError, RuntimeError, OmniClientError) as exc:
                cause = None
                if not has_begun:
                    cause = await self.speakers.encodings.ensurer.cause_of_failure(
                        request_id
                    )
                if cause is None:
                    raise
                if num_left == 0:
                    await _told(stays())
                    reason = f"The speaker prompt could not be had: {cause}"
                    raise _as_told(EncodeError(reason)) from exc
            finally:
                if (close := getattr(outputs, "aclose", None)) is not None:
                    await close()
            outputs = await again()


async def _told(prepared: Awaitable[T]) -> T:
    try:
        return await prepared
    except TTSCacheError as exc:
        raise _as_told(exc) from exc


def _as_told(error: TTSCacheError) -> Exception:
    """Tell the route what is wrong, and the host no more than one line of its log."""
    return RefusedRequestError(str(error)) if report_error(error) else error
