"""The base of all families' adapters: resolve the speaker, ensure, build the prompt.

The host serves a diffusion model by one method, without an adapter. Ours resolves the
speaker first, and the host sees a request that names none; `PromptingEngine` adds the
speaker's address to the prompt on its way to the engine.
"""

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Container, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from vllm_omni.diffusion import registry
from vllm_omni.entrypoints.openai.tts_adapters.base import (
    PreparedRequest,
    SpeechServingContext,
    TTSCapabilities,
)

from vllm_tts_cache import errors
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.catalogue import records
from vllm_tts_cache.entrypoints.metrics import CountedRequest, process_metrics
from vllm_tts_cache.entrypoints.serving import host_speakers, request_speaker
from vllm_tts_cache.entrypoints.serving.fetching import fetch_audio
from vllm_tts_cache.entrypoints.speakers.ensure import MAX_TRIES
from vllm_tts_cache.entrypoints.speakers.inline import Clip
from vllm_tts_cache.entrypoints.speakers.service import SpeakerService
from vllm_tts_cache.logs import logger
from vllm_tts_cache.speaker import reference
from vllm_tts_cache.speaker.checkpoint_dir import checkpoint_dir
from vllm_tts_cache.speaker.family import Family, Mode, family_of_model, refuse_tokens
from vllm_tts_cache.store.speaker_store import StoredSpeaker
from vllm_tts_cache.tenants import Tenant, speaking_tenant

Submit = Callable[[Mapping[str, Any]], AsyncIterator[Any]]
Speak = Callable[[str, Submit], AsyncIterator[Any]]

# What the host's validation takes for inline audio; it is never read.
_UNREAD_AUDIO = "data:,"

# The event loop checks and tokenizes texts up to this, in microseconds; threads others.
SHORT_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """A request's speaker, whose encodings exist.

    Attributes:
        request: A copy of the request without voice and audio, with the ``ref_text``
            that the mode uses.
        texts: What `CachedAdapter.check_texts` returned for it.
    """

    clip: Clip
    mode: Mode
    request: Any
    texts: Any = None


class CachedAdapter:
    """The base of a family's adapter, before the host's adapter of the family.

    `build` resolves the speaker, and gives the host a request that names no speaker.

    Attributes:
        tts_cache_needs_voice: Whether a checkpoint that clones has no other voices.
        tts_cache_checked: Texts of all requests in which control tokens are refused.
    """

    ctx: Any
    capabilities: Any
    tts_cache_family: ClassVar[Family]
    tts_cache_needs_voice: ClassVar[bool] = False
    tts_cache_checked: ClassVar = "input", "ref_text", "instructions", "language"

    @cached_property
    def tts_cache_refusal(self) -> str | None:
        """Why the checkpoint that is served clones no voices; None if it does.

        None too if this process cannot read the checkpoint: the workers, which have
        loaded it, may run on other machines, and refuse by themselves.
        """
        try:
            return self.tts_cache_family.clones(self._checkpoint())
        except errors.CheckpointError as exc:
            logger.warning("Whether this model clones voices is not known: %s", exc)
            return None

    @cached_property
    def tts_cache_clones(self) -> bool:
        """Whether the checkpoint clones voices through this plugin."""
        return bool(self.tts_cache_family.modes) and self.tts_cache_refusal is None

    @abstractmethod
    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Build the prompt of a clone.

        Raises: InvalidSpeakerError, EncodeError, WorkerRPCError.
        """

    def tts_cache_check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would misread. Raises: InvalidSpeakerError."""
        refuse_tokens(self.tts_cache_family.control.names, field, text)

    def validate(self, request: Any) -> str | None:
        """Validate as the host does; `build` validates a request with a speaker."""
        host: Any = super()
        if not self.tts_cache_clones:
            return self._refusal(request) or host.validate(request)
        request_speaker.unset_what_is_ignored(request, self._presets)
        clip, embedding = request.ref_audio, request.speaker_embedding
        names_none = clip is embedding is None and not (request.voice or "").strip()
        if self.tts_cache_needs_voice and names_none:
            return request_speaker.MISSING_VOICE
        if request_speaker.names_speaker(request, self._presets):
            return None
        if embedding is not None:
            try:
                field = "speaker_embedding"
                mode = request_speaker.embedding_mode(self.tts_cache_family, field)
                # Each value may be in a list of its own.
                rows = (v if isinstance(v, list) else [v] for v in embedding)
                records.check_embedding([value for row in rows for value in row])
            except errors.InvalidSpeakerError as exc:
                return str(exc)
            for field, value in mode.stand_in.items():  # the host would infer them
                if getattr(request, field) is None:
                    setattr(request, field, value)
        return host.validate(request)

    async def build(
        self, request: Any, sampling_params_list: list[Any], has_inline_ref_audio: bool
    ) -> PreparedRequest:
        """Resolve the speaker, ensure its encodings, build a prompt that names them.

        Raises: SpeakerRequestError, ServerFaultError; SpeakerReplacedError if the voice
            was replaced each time.
        """
        with process_metrics().request(self.tts_cache_family.name) as counted:
            names_one = request_speaker.names_speaker(request, self._presets)
            if not (self.tts_cache_clones and names_one):
                request_speaker.report("none")
                others = sampling_params_list, has_inline_ref_audio
                return await self.speak(request, *others)
            for _ in range(MAX_TRIES - 1):
                # The voice was deleted or replaced, or the inline clip with a voice.
                with suppress(errors.GoneError):
                    return await self._spoken(request, sampling_params_list, counted)
            return await self._spoken(request, sampling_params_list, counted)

    async def tts_cache_prepared(self, request: Any) -> PreparedRequest:
        """Build a voice's prompt for a request of our own. Raises: As `build`."""
        found = await self._found(request)
        return await self._cloned(request, found, CountedRequest())

    async def speak(self, request: Any, *others: Any) -> PreparedRequest:
        """Build a prompt without reference audio. Raises: InvalidSpeakerError."""
        await CachedAdapter.check_texts(self, request, None)  # not those of a clone
        host: Any = super()
        return await host.build(request, *others)

    async def check_texts(self, request: Any, mode: Any) -> Any:
        """Refuse a control token in a text, or in a clone's transcript.

        A stored transcript may have been registered for another model, or by stock.
        Returns: What `clone` needs as `Speaker.texts`. Raises: InvalidSpeakerError.
        """
        del mode
        for field in self.tts_cache_checked:
            text = getattr(request, field)
            if len(text or "") > SHORT_CHARS:
                await self._service.texts.run(self.tts_cache_check_text, field, text)
            elif text:
                self.tts_cache_check_text(field, text)

    def _checkpoint(self) -> Path:
        """Return the folder of the checkpoint. Raises: CheckpointError."""
        model = self.ctx.engine_client.model_config
        return checkpoint_dir(model.model, model.revision)

    @cached_property
    def _service(self) -> SpeakerService:
        return self.ctx.server.speakers

    @cached_property
    def _presets(self) -> Container[str]:
        return self.ctx.server.builtin_names

    @property
    def _tenant(self) -> Tenant:
        return speaking_tenant(self._service.tenants)

    async def _found(self, request: Any) -> StoredSpeaker | None:
        """Return the registered voice that a request names; None for inline audio.

        Raises: SpeakerNotFoundError, StorageError.
        """
        if request.ref_audio is not None:
            return None
        find = self._service.lookups.find_to_speak
        if (found := await find(self._tenant, request.voice)) is None:
            raise errors.SpeakerNotFoundError(request.voice)
        if (speaking := request_speaker.SPEAKING.get()) is not None:
            speaking.record = found.record
        if found.record.extras_json is not None or (speaking and speaking.unchanged):
            request_speaker.act(request, found.record.extras)
        return found

    async def _spoken(
        self, request: Any, sampling_params_list: list[Any], counted: CountedRequest
    ) -> PreparedRequest:
        found = await self._found(request)
        try:
            if found is not None and found.record.audio_sha256 is None:
                request_speaker.report("none")
                mode = request_speaker.embedding_mode(self.tts_cache_family, "voice")
                embedding = await self._service.lookups.embedding(found.record)
                request.task_type = mode.stand_in.get("task_type", request.task_type)
                named = request_speaker.as_clone(request, mode, stored_ref_text=None)
                named.speaker_embedding = list(embedding)
                self.tts_cache_check(named)
                return await self.speak(named, sampling_params_list, False)
            return await self._cloned(request, found, counted)
        except errors.GoneError:
            if found is not None:
                was = found.record
                stood = request.voice, was.audio_sha256, was.generation
                await self._service.lookups.check_stays(self._tenant, *stood)
            raise

    async def _cloned(
        self, request: Any, found: StoredSpeaker | None, counted: CountedRequest
    ) -> PreparedRequest:
        record = None if found is None else found.record
        stored_ref_text = None if record is None else record.ref_text
        facts = request_speaker.clone_facts(
            request, stored_ref_text=stored_ref_text, is_inline=record is None
        )
        mode = self.tts_cache_family.mode(facts)
        # The host reads the task of this request later, not that of the validated copy.
        request.task_type = mode.stand_in.get("task_type", request.task_type)
        seen = request_speaker.as_clone(request, mode, stored_ref_text=stored_ref_text)
        if record is not None and record.clip_starts_json is not None:
            self._service.model.check_clips(record.num_clips)
            seen.ref_text = records.transcript_of_clips(seen.ref_text, record.num_clips)
        # Before the clip is fetched: a refused request must not fetch one.
        self.tts_cache_check(seen)
        texts = await self.check_texts(seen, mode)
        with nullcontext() if found else self._service.places.inline(self._tenant):
            clip = await self._clip(request, record)
            limits = self.tts_cache_family.limits
            problem = limits.problem(clip.num_samples, clip.sample_rate_hz)
            if problem is not None:
                raise errors.InvalidAudioError(problem)
            need = reference.EncodingNeed(ref=clip.ref, encoder_names=mode.encoders)
            tenant = self._tenant.name if found is None else found.record.tenant
            stored = None if found is None else found.fingerprints
            encodings = self._service.encodings
            existed = await encodings.ensure(need, tenant=tenant, stored=stored)
            ref = clip.ref.signed(encodings.secret, encodings.encoders_id)
            clip = replace(clip, ref=ref)
        counted.outcome = "hit" if existed else "miss"
        request_speaker.report(counted.outcome)
        speaker = Speaker(clip=clip, mode=mode, request=seen, texts=texts)
        return await self.clone(speaker)

    async def _clip(self, request: Any, record: records.SpeakerRecord | None) -> Clip:
        if record is None:
            fetch = partial(fetch_audio, self.ctx.server.media_connector)
            url = request_speaker.single_url(request.ref_audio)
            return await self._service.inline.resolve(url, fetch)
        if (sha := record.audio_sha256) is None:
            # An embedding replaced the voice while the request waited for its audio.
            reason = f"Voice {request.voice!r} was replaced meanwhile. Try again."
            raise errors.SpeakerRequestError(reason)
        return Clip(
            ref=reference.SpeakerRef(audio_sha256=sha, segment=Segment.REGISTERED),
            num_samples=record.num_samples,
            sample_rate_hz=record.sample_rate_hz,
            num_clips=1 if record.clip_starts_json is None else record.num_clips,
        )

    def _refusal(self, request: Any) -> str | None:
        """Return why a checkpoint that does not clone refuses the request, or None."""
        if self.tts_cache_refusal is None:
            return None  # the host decides
        named = request.ref_audio, request.speaker_embedding
        if named != (None, None):
            return self.tts_cache_refusal
        if request_speaker.names_speaker(request, self._presets):
            host: Any = super()
            return host.validate(request) and self.tts_cache_refusal
        return None

    def tts_cache_check(self, seen: Any) -> None:
        """Check a clone's request as the host does. Raises: SpeakerRequestError."""
        host: Any = super()
        seen.ref_audio = _UNREAD_AUDIO
        problem = host.validate(seen)
        seen.ref_audio = None
        if problem is not None:
            raise errors.SpeakerRequestError(problem)


class _NoHostsAdapter:
    """Replaces the host's adapter, which ours call: diffusion models have none."""

    # Empty: a diffusion model has no preset voices.
    capabilities = TTSCapabilities()

    def __init__(self, ctx: SpeechServingContext):
        self.ctx = ctx

    def validate(self, request: Any) -> str | None:
        """Return what is wrong with a request, before its speaker is resolved."""
        return None if request.input.strip() else "Input text cannot be empty"

    async def build(self, _asked: Any, _params: Any, _clip: Any, /) -> PreparedRequest:
        """Leave a prompt without reference audio as the host builds it."""
        return PreparedRequest(prompt={})


class DiffusionAdapter(CachedAdapter, _NoHostsAdapter):
    """Builds the fields of a clone's prompt that the host does not build."""

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Return the speaker's address, and the transcript if its mode uses one."""
        named: dict[str, Any] = {reference.FIELD: speaker.clip.ref.to_wire()}
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
            whole = {**prompt, **more, reference.REQUEST_FIELD: request_id}
            return self._engine.generate(prompt=whole, request_id=request_id, **options)

        return self._speak(request_id, submit)
