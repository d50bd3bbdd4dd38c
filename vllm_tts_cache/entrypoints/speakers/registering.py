"""Registrations on threads of their own, so that they cannot hold speech up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from vllm_tts_cache import errors
from vllm_tts_cache.audio.decode import AudioWarning, decode, decode_clips
from vllm_tts_cache.audio.quality import ClipQuality, Verdict, check_clip, is_below
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.records import IdempotencyKey, NewSpeaker, SpeakerRecord
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.speaker.family import Family, clips_problem
from vllm_tts_cache.store.consents import ConsentRecord
from vllm_tts_cache.store.registering import Registered
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.tenants import Tenant

throttled = ThrottledLog()

# A clip takes up to a second of CPU to decode, and up to 10 MiB while it waits.
NUM_THREADS = 2
# Streams on the same cores wait less, and uploads no longer: docs/performance.md.
NICE = 5
MAX_WAITING = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """The fields of a registration that do not depend on the kind of sample."""

    name: str
    consent: str
    ref_text: str | None = None
    description: str | None = None
    mime_type: str | None = None
    original_filename: str | None = None
    language: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    extras: Mapping[str, Any] = field(default_factory=dict[str, Any])
    expires_at: float | None = None
    precompute: bool = True
    idempotency_key: str | None = None

    def fields(self, tenant: Tenant, *sample: object) -> dict[str, Any]:
        """Return fields of a `NewSpeaker` of the tenant; ``sample`` is for the key."""
        key = IdempotencyKey.of(self.idempotency_key, tenant.name, self, *sample)
        return {**asdict(self), "tenant": tenant.name, "idempotency_key": key}

    def check_texts(self) -> None:
        """Refuse invalid texts before clips are read. Raises: InvalidSpeakerError."""
        # As of a speaker with any sample: this one's is not read yet.
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        NewSpeaker(**{**given, "idempotency_key": None}, embedding=(0.0,))


# Warnings of a clip, and what to call with the voice once it is registered.
Compared = tuple[tuple[AudioWarning, ...], Callable[[SpeakerRecord], None]]
Compare = Callable[[Tenant, Upload | None, ReferenceAudio], Compared]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A registered voice, its clip's warnings, and the quality if it was measured."""

    done: Registered
    warnings: tuple[AudioWarning, ...] = ()
    quality: ClipQuality | None = None


class Uploads:
    """Decodes, checks and registers what is uploaded.

    Attributes:
        changes: Runs changes without a clip, which do not wait for decodes.
        compare: Called in a thread with a clip that is checked, or that is to be
            registered; raises to refuse it.
    """

    def __init__(
        self,
        store: SpeakerStore,
        family: Callable[[], Family | None],
        min_quality: Verdict = "poor",
    ):
        self._store = store
        self._family = family
        self._min_quality: Verdict = min_quality
        self._threads = BoundedExecutor(
            "too many uploads wait",
            num_threads=NUM_THREADS,
            max_waiting=MAX_WAITING,
            nice=NICE,
        )
        self.changes = BoundedExecutor(
            "too many changes wait", num_threads=1, max_waiting=MAX_WAITING
        )
        self.compare: Compare = lambda *_: ((), lambda _record: None)

    async def register_audio(
        self, tenant: Tenant, upload: Upload, *files: bytes, check: bool = True
    ) -> Registration:
        """Register a speaker by a reference clip, or by several.

        A voice of that name is replaced after all clips are decoded, checked and
        stored. If ``check``, the clips' quality is measured.

        Raises: SpeakerRequestError, ServerBusyError, StorageError.
        """
        upload.check_texts()
        register = self._register_clips
        return await self._threads.run(register, tenant, upload, files, check)

    async def check(
        self, tenant: Tenant, data: bytes, ref_text: str | None
    ) -> ClipQuality:
        """Return a clip's quality, without storing the clip.

        Raises: InvalidAudioError, ServerBusyError, ConfigError without a detector.
        """

        def check() -> ClipQuality:
            decoded = decode(data)
            more, _ = self.compare(tenant, None, decoded.audio)
            return check_clip(
                decoded.audio,
                ref_text=ref_text,
                model_problem=self._problem(decoded.audio),
                warnings=decoded.warnings + more,
            )

        return await self._threads.run(check)

    async def register_embedding(
        self, tenant: Tenant, upload: Upload, embedding: tuple[float, ...]
    ) -> Registration:
        """Register a speaker by a raw speaker embedding.

        Raises: SpeakerRequestError, ServerBusyError, StorageError.
        """
        stored = replace(upload, mime_type="application/x-safetensors")
        new = NewSpeaker(
            **stored.fields(tenant, embedding),
            file_size=4 * len(embedding),
            embedding=embedding,
        )
        register = self._store.registrations.register
        done = await self.changes.run(register, new, None, limits=tenant.limits)
        return Registration(done=done)

    async def keep_consent(
        self, tenant: Tenant, name: str, language: str, data: bytes
    ) -> ConsentRecord:
        """Keep a consent recording.

        Raises: SpeakerRequestError, ServerBusyError, StorageError.
        """

        def keep() -> ConsentRecord:
            whose = tenant.name, tenant.limits
            return self._store.consents.add(name, language, decode(data), *whose)

        return await self._threads.run(keep)

    def check_number(self, num_clips: int) -> None:
        """Refuse more clips than the model takes. Raises: InvalidSpeakerError."""
        if (problem := clips_problem(self._family(), num_clips)) is not None:
            raise errors.InvalidSpeakerError("audio_sample", problem)

    def check_registrable(
        self, audio: ReferenceAudio, ref_text: str | None, *, measure: bool = False
    ) -> ClipQuality | None:
        """Refuse a clip that the model does not take, or whose quality is too low.

        Returns the quality, or None if it was not measured.

        Raises: InvalidAudioError, InvalidSpeakerError, LowQualityError.
        """
        self.check_number(audio.num_clips)
        if (problem := self._problem(audio)) is not None:
            raise errors.InvalidAudioError(problem)
        if not measure and self._min_quality == "poor":
            return None
        try:
            quality = check_clip(audio, ref_text=ref_text)
        except errors.ConfigError as exc:
            throttled.warn_of("checking clips", "Clips are not checked: %s", exc)
            return None
        if is_below(quality.verdict, self._min_quality):
            raise errors.LowQualityError([reason.message for reason in quality.reasons])
        return quality

    def shutdown(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()
        self.changes.shutdown()

    def _register_clips(
        self, tenant: Tenant, upload: Upload, files: Sequence[bytes], check: bool
    ) -> Registration:
        decoded = decode_clips(files)
        audio = decoded.audio
        quality = self.check_registrable(audio, upload.ref_text, measure=check)
        more, keep = self.compare(tenant, upload, audio)
        new = NewSpeaker(
            **upload.fields(tenant, *files),
            file_size=sum(map(len, files)),
            audio_sha256=audio.audio_sha256,
            num_samples=audio.num_samples,
            sample_rate_hz=audio.sample_rate_hz,
            clip_starts=audio.clip_starts,
        )
        done = self._store.registrations.register(new, decoded, limits=tenant.limits)
        keep(done.record)
        warnings = decoded.warnings + more
        return Registration(done=done, warnings=warnings, quality=quality)

    def _problem(self, audio: ReferenceAudio) -> str | None:
        if (family := self._family()) is None:
            return None
        return family.limits.problem(audio.num_samples, audio.sample_rate_hz)
