"""The host's speech serving class, with its speaker side replaced by ours."""

import asyncio
import copy
import functools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from vllm.exceptions import VLLMClientError
from vllm.multimodal.media import MediaConnector
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest
from vllm_omni.entrypoints.openai.serving_speech import OmniOpenAIServingSpeech
from vllm_omni.errors import OmniClientError
from vllm_omni.utils.speaker_cache import get_speaker_cache

from vllm_tts_cache import errors
from vllm_tts_cache.catalogue.names import fold
from vllm_tts_cache.catalogue.records import SpeakerRecord
from vllm_tts_cache.config import OUTPUT_RATES_HZ, load_settings
from vllm_tts_cache.entrypoints.metrics import process_metrics
from vllm_tts_cache.entrypoints.serving import adapter as adapters
from vllm_tts_cache.entrypoints.serving import host_speakers, request_speaker
from vllm_tts_cache.entrypoints.serving.fetching import FetchConnection
from vllm_tts_cache.entrypoints.serving.host_http import bounded_error_response
from vllm_tts_cache.entrypoints.speakers import served_model
from vllm_tts_cache.entrypoints.speakers.service import SpeakerService
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.speaker.reference import SpeakerRef
from vllm_tts_cache.tenants import Tenant, speaking_for, speaking_tenant

throttled = ThrottledLog()

# Where a voice is replaced again and again, each new prompt may be lost as well.
MAX_SUBMITS = 3

_ANY_TEXT = "Hello."  # only the KV of what precedes the text is used again
# A decoder gets a voice's audio with the first frames that are spoken.
_NUM_UNHEARD_FRAMES = 3

T = TypeVar("T")
Prepared = tuple[str, Any, dict[str, Any]]
Submitted = tuple[AsyncIterator[Any], SpeakerRef | None]


class RefusedRequestError(ValueError):
    """Raised to the host, which logs one line; our route answers its cause."""


class HostMemory:
    """The host's cache in this process, in which its models keep voices by name."""

    def delete_all(self, _audio_sha256: str | None = None) -> None:
        """Delete all voices: the host does not know them by their audio."""
        get_speaker_cache().clear()

    delete = delete_all


class CachedServingSpeech(OmniOpenAIServingSpeech):
    """Speech requests whose speakers come from the catalogue, by content address."""

    create_error_response = staticmethod(bounded_error_response)
    _diffusion_engine: Any  # the host's, which sets it for a diffusion model only
    _diffusion_adapter: adapters.DiffusionAdapter | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._start()

    @classmethod
    def for_diffusion(cls, *args: Any, **kwargs: Any) -> "CachedServingSpeech":
        """Build as the host does, which skips `__init__` for a diffusion model."""
        speech: Any = super().for_diffusion(*args, **kwargs)
        adapter = adapters.adapter_of(speech, speech._diffusion_engine)
        speech._diffusion_adapter = adapter
        speech._start()
        return speech

    def _start(self) -> None:
        connector: Any = self.media_connector
        connector.connection = self.fetch_connection
        self.fetch_connection.domains = connector.allowed_media_domains
        # What lies behind a URL may change, and no DELETE would empty the host's cache.
        connector._media_cache_dir = None
        if (adapter := self.cached_adapter) is not None:
            process_metrics().begin_family(adapter.tts_cache_family.name)
        if self.note is None:
            # `CachedAdapter.build` finds registered voices: the host, which looks names
            # up before, needs only the presets.
            self._get_available_speakers = set(self.builtin_names).copy

    def _validate_speech_sample_rate(self, request: Any) -> str | None:
        is_taken = self.cached_adapter and request.sample_rate in OUTPUT_RATES_HZ
        return None if is_taken else super()._validate_speech_sample_rate(request)

    # -------- what our parts ask about the model

    @property
    def builtin_names(self) -> frozenset[str]:
        """Speakers that come with the checkpoint."""
        if (adapter := getattr(self, "_adapter", None)) is None:
            return frozenset()
        known = adapter.capabilities
        return frozenset({*known.supported_speakers, *known.precomputed_speakers})

    @property
    def served_family(self) -> Family | None:
        """The family of the model; None if it does not clone through us."""
        adapter = self.cached_adapter
        if adapter is None or not adapter.tts_cache_clones:
            return None
        return adapter.tts_cache_family

    @property
    def needs_voice(self) -> bool:
        """Whether the checkpoint has no voices but those that it clones."""
        adapter = self.cached_adapter
        if adapter is None or not adapter.tts_cache_clones:
            return False
        return adapter.tts_cache_needs_voice

    @property
    def refusal(self) -> str | None:
        """Why the checkpoint clones no voices; None if it does, or is not ours."""
        adapter = self.cached_adapter
        return None if adapter is None else adapter.tts_cache_refusal

    @property
    def other_model(self) -> host_speakers.OtherModel:
        """Describe a model that is of no family of ours."""
        if self._diffusion_mode:  # the host calls each of them OmniVoice
            return adapters.other_model_of(self._diffusion_engine)
        return host_speakers.of_model(self._tts_model_type, self._get_tts_adapter())

    @property
    def note(self) -> str | None:
        """What the host does with references; None on a model of our families."""
        if self.served_family is not None or self.refusal is not None:
            return None
        return self.other_model.note

    @property
    def cached_adapter(self) -> adapters.CachedAdapter | None:
        """Our adapter of the model; None if it is of no family of ours."""
        if self._diffusion_mode:
            return self._diffusion_adapter
        adapter = self._get_tts_adapter()
        return adapter if isinstance(adapter, adapters.CachedAdapter) else None

    @property
    def media_connector(self) -> MediaConnector:
        """The host's connector, which decides what may be fetched."""
        if self._media_connector is None:
            self._media_connector = MediaConnector(
                allowed_local_media_path=self.model_config.allowed_local_media_path,
                allowed_media_domains=self.model_config.allowed_media_domains,
            )
        return self._media_connector

    def check_new(
        self, name: str, ref_text: str | None, extras: Mapping[str, Any]
    ) -> None:
        """Refuse a voice that no request could speak with, and a built-in name.

        Raises: InvalidSpeakerError, CannotCloneError.
        """
        self.speakers.model.check_clones()
        other, note = self.other_model, self.note
        if note is not None and not (other.takes_embeddings or other.takes_clips):
            raise served_model.CannotCloneError(note)
        self.check_fields({"name": name, "ref_text": ref_text, **extras})

    def check_fields(self, given: Mapping[str, Any]) -> None:
        """Refuse built-in names, and a transcript that the model would misread.

        Raises: InvalidSpeakerError.
        """
        builtin = set(map(fold, self.builtin_names))
        for name in filter(None, (given.get("name"), *(given.get("aliases") or ()))):
            if fold(name) in builtin:
                reason = f"{name!r} is a built-in voice of this model; choose another"
                raise errors.InvalidSpeakerError("name", reason)
        adapter, ref_text = self.cached_adapter, given.get("ref_text")
        if adapter is not None and ref_text is not None:
            adapter.tts_cache_check_text("ref_text", ref_text)

    def check_embedding(self, embedding: tuple[float, ...]) -> None:
        """Refuse an embedding that does not fit. Raises: InvalidSpeakerError."""
        field = "speaker_embedding"
        if (family := self.served_family) is not None:
            request_speaker.embedding_mode(family, field)
        elif not self.other_model.takes_embeddings:
            reason = (
                f"{self.other_model.title} takes reference audio, not an embedding; "
                "register the voice with audio_sample"
            )
            raise errors.InvalidSpeakerError(field, reason)
        if (adapter := self._get_tts_adapter()) is not None:
            problem = adapter.validate_tts_embedding_dim(len(embedding))
            if problem is not None:
                raise errors.InvalidSpeakerError(field, problem)

    # -------- what the host expects of its speaker storage

    def _restore_uploaded_speakers(self) -> None:
        """Open the storage; stock opens every stored file here."""
        is_diffusion = self._diffusion_mode
        engine: Any = self._diffusion_engine if is_diffusion else self.engine_client
        settings = load_settings()
        self.fetch_connection = FetchConnection(
            max_waiting=settings.max_fetches, networks=settings.fetch_networks
        )
        model = served_model.ServedModel(
            family=lambda: self.served_family,
            refusal=lambda: self.refusal,
            note=lambda: self.other_model.note,
        )
        self.speakers = SpeakerService(
            settings, engine, model, speech=self, memories=[HostMemory()]
        )
        self.speakers.start()
        self.uploaded_speakers = host_speakers.KnownVoices()  # type: ignore[assignment]
        self._ref_audio_data_url_cache = host_speakers.NoMemo()

    def _refresh_uploaded_speakers(self, *, force: bool = False) -> None:
        """Read no directory: vLLM-Omni 0.32 would, before each request."""

    def _drop_shadowing_uploads(self) -> None:
        """Delete none: a built-in name is looked up before a registered one."""

    def _load_uploaded_audio(self, voice_name: str) -> tuple[Any, int] | None:
        """Return a voice's stored audio, for families that we do not serve.

        Raises: SpeakerRequestError of a voice of several clips, which they do not take.
        """
        try:
            voice = host_speakers.known_voice(voice_name)
            if voice.error is not None:
                raise voice.error
        except errors.StorageError as exc:
            throttled.warn_of("reading a voice", "Reading a voice: %s", exc.log_text)
            return None
        return voice.audio

    def _load_registered_reference(self, reference: Any) -> tuple[Any, int]:
        """Return what vLLM-Omni 0.32 reads from a voice's file for MOSS-TTS.

        Raises: ValueError as the host, SpeakerRequestError as `_load_uploaded_audio`.
        """
        if (audio := self._load_uploaded_audio(reference.name)) is None:
            raise ValueError(f"Voice {reference.name!r} has no audio that can be read")
        return audio

    def _get_uploaded_speaker_embedding(self, voice_name: str) -> list[float] | None:
        """Return a voice's raw embedding, for families that we do not serve."""
        return host_speakers.known_voice(voice_name).embedding

    def shutdown(self) -> None:
        """Stop the host's threads, those that fetch, and the speaker service."""
        super().shutdown()
        self.fetch_connection.shutdown()
        self.speakers.shutdown()

    # -------- requests

    async def create_speech_batch(self, batch_request: Any) -> Any:
        """Speak as the host does, after the voices of all items are read."""
        if self._diffusion_mode:  # which has no batches
            return await super().create_speech_batch(batch_request)
        named = [batch_request, *batch_request.items[: self._batch_max_items]]
        with host_speakers.known(await self._read_for_host(*named)):
            return await super().create_speech_batch(batch_request)

    async def _read_for_host(
        self, *requests: Any
    ) -> dict[str, host_speakers.HostVoice]:
        """Read the voices that requests name, by their names in lower case.

        The host looks them up on the event loop; for a model of ours, presets alone.
        """
        if self.served_family is not None:
            return {}
        names = {r.voice.lower(): r.voice for r in requests if r.voice is not None}
        left = names.keys() - host_speakers.known_names()  # which are of a batch
        return {key: await self._read_voice(names[key]) for key in left}

    async def _read_voice(self, name: str) -> host_speakers.HostVoice:
        try:
            tenant = speaking_tenant(self.speakers.tenants)
            if (found := await self.speakers.lookups.find(tenant, name)) is None:
                return host_speakers.NO_VOICE
            run = self.speakers.lookups.reads.run
            return await run(host_speakers.read_voice, self.speakers.store, found)
        except errors.TTSCacheError as exc:
            return host_speakers.HostVoice(error=exc)

    async def _prepare_speech_generation(
        self,
        request: Any,
        request_id: str | None = None,
        has_inline_ref_audio: bool | None = None,
        arrival_time: float | None = None,
    ) -> Prepared:
        """Prepare as the host does; a request whose prompt the engine loses is resent.

        Raises: RefusedRequestError inside a route of ours; else TTSCacheError.
        """
        request_speaker.begin(request)
        self.speakers.kv_warming.stop()
        # The same id each time: the client's request is aborted by it.
        prepare = functools.partial(
            super()._prepare_speech_generation,
            request,
            has_inline_ref_audio=has_inline_ref_audio,
            arrival_time=arrival_time,
        )
        try:
            request_speaker.check_sampling(request.extra_params)
        except errors.InvalidSpeakerError as exc:
            raise _as_host_error(exc) from exc
        with host_speakers.known(await self._read_for_host(request)):
            prepared = await _with_host_errors(prepare(request_id=request_id))
        request_id, outputs, params = prepared
        outputs = _refusing(outputs)
        if (ref := SpeakerRef.from_info(params)) is None:
            return request_id, outputs, params
        self.speakers.kv_warming.skip_spoken(ref.audio_sha256)

        async def again() -> Submitted:
            _, outputs, params = await _with_host_errors(prepare(request_id=request_id))
            # The host removes this at the first output, which a lost prompt never has.
            self._speech_output_policies.pop(request_id, None)
            return _refusing(outputs), SpeakerRef.from_info(params)

        begun = self._until_begun(request, request_id, (outputs, ref), again)
        return request_id, begun, params

    async def speak_unheard(self, record: SpeakerRecord) -> None:
        """Make the engine speak a few frames with a voice, so that it caches the KV.

        If the call is cancelled, the engine's request ends as well.

        Raises: TTSCacheError, and what the engine raises.
        """
        request_speaker.SPEAKING.set(None)  # that of who registered the voice
        adapter: Any = self.cached_adapter
        engine: Any = self.engine_client
        # By the voice's id: the voice may have got another name since.
        request = OpenAICreateSpeechRequest(input=_ANY_TEXT, voice=record.speaker_id)
        request_id = f"prefill-{uuid.uuid4().hex}"
        with speaking_for(Tenant(name=record.tenant)):
            prompt = (await adapter.tts_cache_prepared(request)).prompt
            defaults = [each.clone() for each in engine.default_sampling_params_list]
            params = adapter.apply_sampling_overrides(
                defaults, request, prompt, request_id
            )
            params[0].max_tokens = params[0].min_tokens = _NUM_UNHEARD_FRAMES
            # Outside of the block the engine would refuse it as a foreign request.
            outputs = engine.generate(
                prompt=prompt, request_id=request_id, sampling_params_list=params
            )
        async for _ in outputs:
            pass

    async def _create_diffusion_speech(self, request: Any) -> Any:
        """Speak as the host does; the prompt names the speaker by content address."""
        request_speaker.begin(request)
        host = super()._create_diffusion_speech
        if (adapter := self._diffusion_adapter) is None:
            with host_speakers.known(await self._read_for_host(request)):
                return await host(request)
        is_inline = request.ref_audio is not None
        build = functools.partial(adapter.build, request, [], is_inline)
        try:
            if (problem := adapter.validate(request)) is not None:
                raise errors.SpeakerRequestError(problem)
            named = (await build()).prompt
        except asyncio.CancelledError:  # as the host: its route counts what it answers
            return self._diffusion_error_response("Client disconnected")
        except errors.TTSCacheError as exc:
            request_speaker.report_error(exc)
            return self._diffusion_error_response(str(exc), exc.http_status)
        if (ref := SpeakerRef.from_info(named)) is None:
            return await host(request)

        def speak(request_id: str, submit: adapters.Submit) -> AsyncIterator[Any]:
            async def again() -> Submitted:
                prompt = (await _with_host_errors(build())).prompt
                return submit(prompt), SpeakerRef.from_info(prompt)

            begun = submit(named), ref
            return self._until_begun(request, request_id, begun, again)

        # The host's method builds the prompt between this one and `PromptingEngine`.
        once = copy.copy(self)
        engine = self._diffusion_engine
        once._diffusion_engine = adapters.PromptingEngine(engine, speak)
        host = super(CachedServingSpeech, once)._create_diffusion_speech
        return await host(request_speaker.without_speaker(request))

    async def _until_begun(
        self,
        request: Any,
        request_id: str,
        submitted: Submitted,
        again: Callable[[], Awaitable[Submitted]],
    ) -> AsyncIterator[Any]:
        """Yield outputs; submit anew if the prompt is lost before the first output."""
        outputs, ref = submitted
        encodings = self.speakers.encodings
        for num_left in reversed(range(MAX_SUBMITS)):
            has_begun = False
            # A prefill may have begun while this request's speaker was encoded.
            self.speakers.kv_warming.stop()
            # The first step submits the request, which takes the host milliseconds of
            # the event loop right after as many to prepare it. Other tasks go first,
            # and the cancelled prefill ends.
            await asyncio.sleep(0)
            try:
                async for output in outputs:
                    has_begun = True
                    yield output
                return
            # A diffusion model that computes one step at a time raises the last one.
            except (EngineGenerateError, RuntimeError, OmniClientError) as exc:
                cause = None
                if not has_begun:
                    cause = await encodings.cause_of_failure(request_id)
                if cause is None:
                    raise
                if num_left == 0:
                    if ref is not None and request.ref_audio is None:
                        # If the voice was replaced, this raises that error instead.
                        stays = self.speakers.lookups.check_stays(
                            speaking_tenant(self.speakers.tenants),
                            request.voice,
                            ref.audio_sha256,
                        )
                        await _with_host_errors(stays)
                    reason = f"The speaker prompt could not be had: {cause}"
                    raise _as_host_error(errors.EncodeError(reason)) from exc
            finally:
                if (close := getattr(outputs, "aclose", None)) is not None:
                    await close()
            if ref is not None:
                encodings.recheck(ref.audio_sha256)
            outputs, ref = await again()  # `ref` differs if the voice was replaced


async def _refusing(outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yield outputs; report an engine that refuses to begin as an invalid request.

    It may refuse a text longer than the model's context, which only the engine counts.

    Raises: RefusedRequestError inside a route of ours; else SpeakerRequestError.
    """
    has_begun = False
    try:
        async for output in outputs:
            has_begun = True
            yield output
    except (ValueError, VLLMClientError) as exc:
        if has_begun or isinstance(exc, OmniClientError):
            raise
        raise _as_host_error(errors.InvalidSpeakerError("request", str(exc))) from exc
    finally:
        if (close := getattr(outputs, "aclose", None)) is not None:
            await close()


async def _with_host_errors(prepared: Awaitable[T]) -> T:
    try:
        return await prepared
    except errors.TTSCacheError as exc:
        raise _as_host_error(exc) from exc


def _as_host_error(error: errors.TTSCacheError) -> Exception:
    """Report an error to our route, if there is one; return what to raise."""
    is_reported = request_speaker.report_error(error)
    return RefusedRequestError(str(error)) if is_reported else error
