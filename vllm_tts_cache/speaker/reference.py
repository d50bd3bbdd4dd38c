"""The protocol of reference encoders, and how requests name speakers; without torch."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vllm_tts_cache.audio.reference import ReferenceAudio, Segment
from vllm_tts_cache.store.encoding import ADDRESS, Encoding

# A key of the host's additional_information, or of a diffusion model's prompt.
FIELD = "tts_cache_speaker"
# Beside it: the API process's request id, which the host gives no diffusion model.
REQUEST_FIELD = "tts_cache_request"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Device memory that an encode takes at most, without the weights.

    Attention grows with the square of a clip's length, so the line holds for clips of
    up to 30 s, and lies above the measured lengths (docs/gpu.md).
    """

    fixed_bytes: int = 0
    bytes_per_second: int = 0

    def of(self, seconds: float) -> int:
        """Return the bytes for a clip of this length."""
        return self.fixed_bytes + math.ceil(seconds * self.bytes_per_second)

    def scaled(self, share: float) -> "MemoryNeed":
        """Return the need of a network with this share of the width."""
        return MemoryNeed(
            fixed_bytes=math.ceil(share * self.fixed_bytes),
            bytes_per_second=math.ceil(share * self.bytes_per_second),
        )


class ReferenceEncoder(Protocol):
    """A network that turns reference audio into an encoding.

    Implementations own their modules, as the decode loop would cast or move a shared
    one. They encode one audio at a time, so an encoding never depends on others.
    """

    @property
    def name(self) -> str:
        """Its name, unique in its family."""
        ...

    @property
    def fingerprint(self) -> str:
        """64 lowercase hex digits over all that decides an encoding but the device.

        Encoders of one fingerprint on one kind of device return the same bytes. Another
        kind (CPU or GPU, another chip) rounds differently; its encodings are used
        unchanged, as encoding all voices again on a new card would be worse.
        """
        ...

    @property
    def need(self) -> MemoryNeed:
        """The device memory that an encode takes."""
        ...

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio; several threads may call it at once.

        Raises: EncodeError: The network failed on this audio.
        """
        ...


# The encoders of a checkpoint, by name.
Encoders = dict[str, ReferenceEncoder]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeakerRef:
    """A reference audio by content address, without waveform, name or path.

    The worker completes it to encoding keys with the fingerprints of its own encoders,
    so a request can never name an encoding of another checkpoint.

    Attributes:
        encoders: `encoders_id` of those that the prompt was built by; a worker with
            others refuses it. Empty if the prompt was built without encodings.
        signature: Digest of the rest by the secret of `Database.secret`. Without it a
            worker refuses the reference: no client can make one up.
    """

    audio_sha256: str
    segment: Segment
    encoders: str = ""
    signature: str = field(default="", compare=False)

    def signed(self, secret: bytes, encoders: str) -> "SpeakerRef":
        """Return the reference by these encoders, signed with the servers' secret."""
        named = f"{FIELD} {self.audio_sha256} {self.segment.value} {encoders}"
        # After a quiet moment an HMAC of OpenSSL takes three times as long as this.
        keyed = hashlib.blake2b(named.encode(), key=secret, digest_size=16)
        return replace(self, encoders=encoders, signature=keyed.hexdigest())

    def to_wire(self) -> list[str]:
        """Return plain strings, which survive the host's serialization."""
        return [self.audio_sha256, self.segment.value, self.encoders, self.signature]

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> "SpeakerRef | None":
        """Read the reference in a request's additional information, if it has one.

        Raises: ValueError if the field holds anything else.
        """
        if (wire := info.get(FIELD)) is None:
            return None
        audio_sha256, segment, encoders, signature = wire
        if ADDRESS.fullmatch(audio_sha256) is None:
            raise ValueError(f"{FIELD} does not hold a content address")
        return cls(
            audio_sha256=audio_sha256,
            segment=Segment(segment),
            encoders=encoders,
            signature=signature,
        )


def with_keyed_salt(prompt: Any, secret: bytes) -> Any:
    """Return an engine's prompt whose salt, if it has one, no client can name."""
    if not isinstance(prompt, dict) or (salt := prompt.get("cache_salt")) is None:
        return prompt
    keyed = hashlib.blake2b(f"salt {salt}".encode(), key=secret, digest_size=32)
    return {**prompt, "cache_salt": keyed.hexdigest()}


def encoders_id(fingerprints: Mapping[str, str]) -> str:
    """Return 16 hex digits over a worker's fingerprints, by the encoders' names."""
    text = "\n".join(f"{name} {fingerprints[name]}" for name in sorted(fingerprints))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingNeed:
    """The encodings that a mode needs of one reference audio."""

    ref: SpeakerRef
    encoder_names: tuple[str, ...]
