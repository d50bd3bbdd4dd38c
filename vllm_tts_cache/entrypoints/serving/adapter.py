"""What the adapters of all families that we serve share: resolve, ensure, prompt."""

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Container
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from cachetools import LRUCache
from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest

from vllm_tts_cache.catalogue.records import (
    Segment,
    SpeakerRecord,
    check_embedding,
    transcript_of_clips,
)
from vllm_tts_cache.entrypoints.metrics.series import CountedRequest, process_metrics
from vllm_tts_cache.entrypoints.serving.fetching import fetch_audio
from vllm_tts_cache.entrypoints.serving.request_speaker import (
    MISSING_VOICE,
    as_clone,
    clone_facts,
    embedding_mode,
    names_speaker,
    report,
    single_url,
    unset_what_is_ignored,
)
from vllm_tts_cache.entrypoints.speakers.ensure import MAX_TRIES
from vllm_tts_cache.entrypoints.speakers.inline import Clip
from vllm_tts_cache.entrypoints.speakers.service import SpeakerService
from vllm_tts_cache.errors import (
    CheckpointError,
    GoneError,
    InvalidAudioError,
    InvalidSpeakerError,
    SpeakerNotFoundError,
    SpeakerRequestError,
)
from vllm_tts_cache.speaker.checkpoint_dir import local_checkpoint
from vllm_tts_cache.speaker.family import Family, Mode
from vllm_tts_cache.speaker.reference import EncodingNeed, SpeakerRef
from vllm_tts_cache.store.speaker_store import StoredSpeaker
from vllm_tts_cache.tenants import Tenant, speaking_tenant

logger = logging.getLogger("vllm.vllm_tts_cache")

# What the host's validation takes for inline audio; it is never read.
_ELSEWHERE = "data:,"

# A text is checked and cut into tokens in microseconds; a long one holds up the loop.
SHORT_CHARS = 2000
_MAX_STORED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """A request's speaker, whose encodings exist.

    Attributes:
        request: Without its speaker: no voice, no audio, the mode's ``ref_text``.
    """

    clip: Clip
    mode: Mode
    request: Any

    @property
    def ref(self) -> SpeakerRef:
        """What names it to the engine."""
        return self.clip.ref


class CachedAdapter:
    """Comes before the host's adapter of a family.

    The speaker is resolved where the prompt is built, so the host sees a request that
    names no speaker.

    Attributes:
        tts_cache_needs_voice: Whether a checkpoint that clones has no other voices.
    """

    ctx: Any
    capabilities: Any
    tts_cache_family: ClassVar[Family]
    tts_cache_needs_voice: ClassVar[bool] = False

    @cached_property
    def tts_cache_refusal(self) -> str | None:
        """Why the checkpoint that is served clones no voices; None if it does.

        None as well where it cannot be read: the workers, which have loaded it, may run
        elsewhere, and refuse for themselves.
        """
        try:
            return self.tts_cache_family.clones(self._checkpoint())
        except CheckpointError as exc:
            logger.warning("Whether this model clones voices is not known: %s", exc)
            return None

    @cached_property
    def tts_cache_clones(self) -> bool:
        """Whether the checkpoint clones voices through us."""
        return bool(self.tts_cache_family.modes) and self.tts_cache_refusal is None

    @abstractmethod
    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Build the prompt of a clone.

        Raises: InvalidSpeakerError, EncodeError, WorkerRPCError.
        """

    def tts_cache_check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would misread. Raises: InvalidSpeakerError."""

    def validate(self, request: Any) -> str | None:
        """As the host, except for a request that names a speaker: `build` does that."""
        host: Any = super()
        if not self.tts_cache_clones:
            return self._refusal(request) or host.validate(request)
        unset_what_is_ignored(request, self._presets)
        clip, embedding = request.ref_audio, request.speaker_embedding
        names_none = clip is embedding is None and not (request.voice or "").strip()
        if self.tts_cache_needs_voice and names_none:
            return MISSING_VOICE
        if names_speaker(request, self._presets):
            return None
        if embedding is not None:
            try:
                mode = embedding_mode(self.tts_cache_family, "speaker_embedding")
                # Its values may be in a list of their own.
                rows = (v if isinstance(v, list) else [v] for v in embedding)
                check_embedding([value for row in rows for value in row])
            except InvalidSpeakerError as exc:
                return str(exc)
            for field, value in mode.stand_in.items():  # as the host infers it
                if getattr(request, field) is None:
                    setattr(request, field, value)
        return host.validate(request)

    async def build(
        self, request: Any, sampling_params_list: list[Any], has_inline_ref_audio: bool
    ) -> PreparedRequest:
        """Resolve the speaker, ensure its encodings, build a prompt that names them.

        Raises: SpeakerRequestError, ServerFaultError; SpeakerReplacedError of a voice
            that was replaced each time.
        """
        with process_metrics().request(self.tts_cache_family.name) as counted:
            if not (self.tts_cache_clones and names_speaker(request, self._presets)):
                report("none")
                return await self.speak(
                    request, sampling_params_list, has_inline_ref_audio
                )
            for _ in range(MAX_TRIES - 1):
                # Deleted or replaced since, or an inline clip was deleted with a voice.
                with suppress(GoneError):
                    return await self._spoken(request, sampling_params_list, counted)
            return await self._spoken(request, sampling_params_list, counted)

    async def tts_cache_prepared(self, request: Any) -> PreparedRequest:
        """Build the prompt of a registered voice for a request that is no client's.

        Raises: as `build`.
        """
        found = await self._found(request)
        return await self._cloned(request, found, CountedRequest())

    async def speak(
        self, request: Any, sampling_params_list: list[Any], has_inline_ref_audio: bool
    ) -> PreparedRequest:
        """Build the prompt of a request without reference audio, as the host does."""
        host: Any = super()
        return await host.build(request, sampling_params_list, has_inline_ref_audio)

    async def check_texts(self, request: Any, *, has_own_ref_text: bool) -> None:
        """Refuse texts of a clone that the model would misread: here none.

        Args:
            request: With the transcript that the clone is made with.
            has_own_ref_text: Whether that came with the request; a stored one need not
                be checked each time.

        Raises: InvalidSpeakerError.
        """

    def _checkpoint(self) -> Path:
        """Return the folder of the checkpoint. Raises: CheckpointError."""
        return local_checkpoint(self.ctx.engine_client.model_config)

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
        tenant = speaking_tenant(self._service.tenants)
        find = self._service.lookups.find_to_speak
        if (found := await find(tenant, request.voice)) is None:
            raise SpeakerNotFoundError(request.voice)
        return found

    async def _spoken(
        self, request: Any, sampling_params_list: list[Any], counted: CountedRequest
    ) -> PreparedRequest:
        found = await self._found(request)
        try:
            if found is not None and found.record.audio_sha256 is None:
                report("none")
                mode = embedding_mode(self.tts_cache_family, "voice")
                task_type = mode.stand_in.get("task_type", request.task_type)
                request.task_type = task_type
                embedding = await self._service.lookups.embedding(found.record)
                named = as_clone(request, mode, stored_ref_text=None)
                named.speaker_embedding = list(embedding)
                self._check(named)
                return await self.speak(named, sampling_params_list, False)
            return await self._cloned(request, found, counted)
        except GoneError:
            if found is not None:
                await self._service.lookups.check_stays(
                    self._tenant, request.voice, found.record.audio_sha256
                )
            raise

    async def _cloned(
        self, request: Any, found: StoredSpeaker | None, counted: CountedRequest
    ) -> PreparedRequest:
        record = None if found is None else found.record
        stored_ref_text = None if record is None else record.ref_text
        facts = clone_facts(
            request, stored_ref_text=stored_ref_text, is_inline=record is None
        )
        mode = self.tts_cache_family.mode(facts)
        # Later the host reads the task of this request, not of the copy it validates.
        request.task_type = mode.stand_in.get("task_type", request.task_type)
        seen = as_clone(request, mode, stored_ref_text=stored_ref_text)
        if record is not None and record.clip_starts_json is not None:
            self._service.model.check_clips(record.num_clips)
            seen.ref_text = transcript_of_clips(seen.ref_text, record.num_clips)
        # First what is free: a request that is refused must not fetch.
        self._check(seen)
        await self.check_texts(seen, has_own_ref_text=bool(request.ref_text))
        with nullcontext() if found else self._service.places.inline(self._tenant):
            clip = await self._clip(request, record)
            limits = self.tts_cache_family.limits
            problem = limits.problem(clip.num_samples, clip.sample_rate_hz)
            if problem is not None:
                raise InvalidAudioError(problem)
            need = EncodingNeed(ref=clip.ref, encoder_names=mode.encoders)
            ensure = self._service.encodings.ensure
            if found is None:
                existed = await ensure(need, tenant=self._tenant.name)
            else:
                tenant, stored = found.record.tenant, found.fingerprints
                existed = await ensure(need, tenant=tenant, stored=stored)
        counted.outcome = "hit" if existed else "miss"
        report(counted.outcome)
        return await self.clone(Speaker(clip=clip, mode=mode, request=seen))

    async def _clip(self, request: Any, record: SpeakerRecord | None) -> Clip:
        if record is None:
            fetch = partial(fetch_audio, self.ctx.server.media_connector)
            return await self._service.inline.resolve(
                single_url(request.ref_audio), fetch
            )
        if (sha := record.audio_sha256) is None:
            # It was replaced by an embedding while its audio was waited for.
            reason = f"Voice {request.voice!r} was replaced meanwhile. Try again."
            raise SpeakerRequestError(reason)
        return Clip(
            ref=SpeakerRef(audio_sha256=sha, segment=Segment.REGISTERED),
            num_samples=record.num_samples,
            sample_rate_hz=record.sample_rate_hz,
            num_clips=1 if record.clip_starts_json is None else record.num_clips,
        )

    def _refusal(self, request: Any) -> str | None:
        """Say why a checkpoint without encoders cannot speak with this speaker."""
        if self.tts_cache_refusal is None:
            return None  # the host clones with it, or not
        named = request.ref_audio, request.speaker_embedding
        if named != (None, None):
            return self.tts_cache_refusal
        if names_speaker(request, self._presets):
            host: Any = super()
            return host.validate(request) and self.tts_cache_refusal
        return None

    def _check(self, seen: Any) -> None:
        host: Any = super()
        seen.ref_audio = _ELSEWHERE
        problem = host.validate(seen)
        seen.ref_audio = None
        if problem is not None:
            raise SpeakerRequestError(problem)


class TextCheckingAdapter(CachedAdapter):
    """Refuses control tokens in what is to be spoken and in its transcript."""

    @abstractmethod
    def tts_cache_check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would misread. Raises: InvalidSpeakerError."""

    async def check_texts(self, request: Any, *, has_own_ref_text: bool) -> None:
        """Refuse a control token in the text or in its transcript.

        Raises: InvalidSpeakerError.
        """
        await self._check_text("input", request.input)
        if request.ref_text is None:
            return
        if has_own_ref_text:
            await self._check_text("ref_text", request.ref_text)
        else:
            await self._check_stored(request.ref_text)

    async def speak(
        self, request: Any, sampling_params_list: list[Any], has_inline_ref_audio: bool
    ) -> PreparedRequest:
        """As the host. Raises: InvalidSpeakerError."""
        await self._check_text("input", request.input)
        return await super().speak(request, sampling_params_list, has_inline_ref_audio)

    async def _check_text(self, field: str, text: str) -> None:
        if len(text) <= SHORT_CHARS:
            self.tts_cache_check_text(field, text)
        else:
            await self._service.texts.run(self.tts_cache_check_text, field, text)

    async def _check_stored(self, text: str) -> None:
        # Once for each: registered for another model or by stock, it was not checked.
        # Kept by its digest, as the text would outlive its voice here.
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in self._checked:
            await self._check_text("ref_text", text)
        self._checked[digest] = None

    @cached_property
    def _checked(self) -> LRUCache[bytes, None]:
        return LRUCache(_MAX_STORED)
