"""Registrations on threads of their own, so that they cannot hold speech up."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from vllm_tts_cache.audio.decode import AudioWarning, decode
from vllm_tts_cache.catalogue.names import clean_new
from vllm_tts_cache.catalogue.record import NewSpeaker, check_text
from vllm_tts_cache.entrypoints.executors import BoundedExecutor
from vllm_tts_cache.errors import InvalidAudioError
from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.store.registrations import Registered
from vllm_tts_cache.store.speaker_store import SpeakerStore

# A clip takes up to a second of CPU to decode, and up to 10 MiB while it waits.
NUM_THREADS = 2
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

    def check_texts(self) -> None:
        """Refuse a name or a text that cannot be, before anything is spent on it.

        Raises: InvalidSpeakerError.
        """
        clean_new(self.name)
        check_text("consent", self.consent)
        check_text("ref_text", self.ref_text)
        check_text("description", self.description)
        check_text("mime_type", self.mime_type)
        check_text("original_filename", self.original_filename)


class Uploads:
    """Decodes, checks and registers what is uploaded.

    Args:
        family: Tells which family is served, whose limits a clip must keep.
    """

    def __init__(self, store: SpeakerStore, family: Callable[[], Family | None]):
        self._store = store
        self._family = family
        self.threads = BoundedExecutor(
            "too many uploads wait", num_threads=NUM_THREADS, max_waiting=MAX_WAITING
        )

    async def register_audio(
        self, upload: Upload, data: bytes
    ) -> tuple[Registered, tuple[AudioWarning, ...]]:
        """Register a speaker by a reference clip.

        Nothing that exists is touched before the clip is decoded, checked and safe.

        Raises: SpeakerRequestError, ServerBusyError, StorageError.
        """
        upload.check_texts()
        return await self.threads.run(self._register_clip, upload, data)

    async def register_embedding(
        self, upload: Upload, embedding: tuple[float, ...]
    ) -> Registered:
        """Register a speaker by a raw speaker embedding.

        Raises: SpeakerRequestError, ServerBusyError, StorageError.
        """
        stored = replace(upload, mime_type="application/x-safetensors")
        new = NewSpeaker(
            **asdict(stored), file_size=4 * len(embedding), embedding=embedding
        )
        return await self.threads.run(self._store.register, new, None)

    def shutdown(self) -> None:
        """Stop the threads."""
        self.threads.shutdown()

    def _register_clip(
        self, upload: Upload, data: bytes
    ) -> tuple[Registered, tuple[AudioWarning, ...]]:
        decoded = decode(data)
        audio = decoded.audio
        if (family := self._family()) is not None:
            problem = family.limits.problem(audio.num_samples, audio.sample_rate_hz)
            if problem is not None:
                raise InvalidAudioError(problem)
        new = NewSpeaker(
            **asdict(upload),
            file_size=len(data),
            audio_sha256=audio.audio_sha256,
            num_samples=audio.num_samples,
            sample_rate_hz=audio.sample_rate_hz,
        )
        return self._store.register(new, decoded), decoded.warnings
