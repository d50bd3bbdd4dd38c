"""What is registered, and what registering takes."""

import math
import struct
from dataclasses import dataclass

from vllm_tts_cache.catalogue.names import clean, fold, is_storable
from vllm_tts_cache.errors import InvalidSpeakerError

DEFAULT_TENANT = "default"
MAX_EMBEDDING_DIM = 4096

_TEXT_FIELDS = ("consent", "ref_text", "description", "mime_type", "original_filename")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeakerRecord:
    """A registered speaker.

    Attributes:
        tenant: Whose speaker it is; a name is unique within its tenant.
        name: As it was given; ``name_key`` is the folded form that is compared.
        generation: Grows with every registration, whatever the name, and is never
            used again, deleted or not.
        audio_sha256: Content address of the reference audio; None for a speaker
            that was registered as an embedding.
        num_samples: Length of the mono reference audio; 0 without audio.
        sample_rate_hz: Its rate; 0 without audio.
        ref_text: What is said in the reference audio.
        embedding_dim: Values of the registered embedding; None with audio.
        file_size: Bytes of the uploaded file.
        created_at: When it was registered, in Unix seconds.
    """

    tenant: str = DEFAULT_TENANT
    name: str
    name_key: str
    generation: int
    audio_sha256: str | None
    num_samples: int
    sample_rate_hz: int
    ref_text: str | None
    consent: str
    description: str | None
    embedding_dim: int | None
    mime_type: str | None
    original_filename: str | None
    file_size: int | None
    created_at: float

    @property
    def seconds(self) -> float:
        """Length of the reference audio; 0.0 without audio."""
        return self.num_samples / self.sample_rate_hz if self.sample_rate_hz else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSpeaker:
    """What registering takes: a name, and either stored audio or an embedding.

    Attributes:
        embedding: Finite values, kept as float32; at most ``MAX_EMBEDDING_DIM``.
        created_at: Unix seconds; None for the time of registration.
        (The others are those of `SpeakerRecord`.)

    Raises:
        InvalidSpeakerError: A field cannot be registered.
    """

    name: str
    consent: str
    tenant: str = DEFAULT_TENANT
    audio_sha256: str | None = None
    num_samples: int = 0
    sample_rate_hz: int = 0
    embedding: tuple[float, ...] | None = None
    ref_text: str | None = None
    description: str | None = None
    mime_type: str | None = None
    original_filename: str | None = None
    file_size: int | None = None
    created_at: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", clean(self.name))
        for field in _TEXT_FIELDS:
            if not is_storable(getattr(self, field) or ""):
                raise InvalidSpeakerError(field, "it contains an unpaired surrogate")
        if (self.audio_sha256 is None) == (self.embedding is None):
            reason = "give either reference audio or an embedding"
            raise InvalidSpeakerError("speaker", reason)
        if self.embedding is not None:
            _check_embedding(self.embedding)
        elif self.num_samples <= 0 or self.sample_rate_hz <= 0:
            raise InvalidSpeakerError("audio_sample", "it has no samples")

    @property
    def name_key(self) -> str:
        """The folded name."""
        return fold(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The new record, and the one whose name it took over."""

    record: SpeakerRecord
    replaced: SpeakerRecord | None


def pack_embedding(embedding: tuple[float, ...]) -> bytes:
    """float32, little-endian.

    Raises:
        OverflowError: A value does not fit into float32.
    """
    return struct.pack(f"<{len(embedding)}f", *embedding)


def unpack_embedding(data: bytes) -> tuple[float, ...]:
    """The inverse of `pack_embedding`."""
    return struct.unpack(f"<{len(data) // 4}f", data)


def _check_embedding(embedding: tuple[float, ...]) -> None:
    if not 1 <= len(embedding) <= MAX_EMBEDDING_DIM:
        reason = f"it has {len(embedding)} values, allowed are 1 to {MAX_EMBEDDING_DIM}"
        raise InvalidSpeakerError("speaker_embedding", reason)
    try:
        finite = all(map(math.isfinite, unpack_embedding(pack_embedding(embedding))))
    except OverflowError:
        finite = False
    if not finite:
        raise InvalidSpeakerError("speaker_embedding", "a value is no finite float32")
