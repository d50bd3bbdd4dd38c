"""What turns reference audio into encodings, and how requests name them; without torch.

`ReferenceEncoder` is the protocol of the networks, `Lane` the order in which encodings
are made, and `SpeakerRef` what crosses from the API process to the worker.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.records import Segment
from vllm_tts_cache.store.encoding import Encoding

# In the host's additional_information; of a diffusion model, in the prompt itself.
FIELD = "tts_cache_speaker"
# There too: as the API process calls the request. Such a model is not told otherwise.
REQUEST_FIELD = "tts_cache_request"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Device memory that an encode takes beside the weights, at most.

    What is computed in slices of time needs the same for every clip; the rest grows
    with the clip, attention with its square. So the line is meant for clips of up to
    30 s, and lies above what was measured of some lengths (docs/gpu.md).
    """

    fixed_bytes: int = 0
    bytes_per_second: int = 0

    def of(self, seconds: float) -> int:
        """Bytes for so much audio."""
        return self.fixed_bytes + math.ceil(seconds * self.bytes_per_second)

    def scaled(self, share: float) -> "MemoryNeed":
        """That of a network which is so much as wide."""
        return MemoryNeed(
            fixed_bytes=math.ceil(share * self.fixed_bytes),
            bytes_per_second=math.ceil(share * self.bytes_per_second),
        )


class ReferenceEncoder(Protocol):
    """A network that turns reference audio into an encoding.

    Implementations own their modules, whole and in their own precision: a module
    shared with the decode loop would be cast or moved under one of the two. They
    encode one audio at a time, so an encoding never depends on its neighbours.
    """

    @property
    def name(self) -> str:
        """Which encoder of its family this is; unique there."""
        ...

    @property
    def fingerprint(self) -> str:
        """64 lowercase hex digits over all that decides an encoding but the device.

        Encoders of one fingerprint on one kind of device give the same bytes. Another
        kind (CPU or GPU, another chip) rounds otherwise; its encodings are taken as
        they are, since making all voices anew on a new card would be worse.
        """
        ...

    @property
    def need(self) -> MemoryNeed:
        """What an encode takes."""
        ...

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio; safe to call from any thread, several at once included.

        Raises:
            EncodeError: The network failed on this audio.
        """
        ...


class Lane(IntEnum):
    """What goes first, on both sides of the RPC; within a lane, who came first.

    The last two take turns: inline clips that come without end may not hold up the
    voices that are registered meanwhile, nor thousands of those an inline clip.
    """

    URGENT = 0  # a request waits for a registered voice
    REGISTERED = 1  # no request waits: it may be one of thousands
    INLINE = 2  # a request waits for a clip of its own

    @classmethod
    def of(cls, segment: Segment, *, urgent: bool) -> "Lane":
        """Return the lane of what somebody wants encoded.

        Args:
            segment: Whose budget the encoding counts against.
            urgent: Whether a request waits, and not only a precompute.
        """
        if segment is Segment.INLINE:
            return cls.INLINE
        return cls.URGENT if urgent else cls.REGISTERED


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeakerRef:
    """A reference audio by content address; no waveform, no name, no path.

    The worker completes it to encoding keys with the fingerprints of the encoders
    that it loaded, so a request can never name an encoding of another checkpoint.
    """

    audio_sha256: str
    segment: Segment

    def to_wire(self) -> list[str]:
        """Return plain strings, which survive the host's serialization."""
        return [self.audio_sha256, self.segment.value]

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> "SpeakerRef | None":
        """Read the reference out of a request's additional information.

        Raises: ValueError if the field is there but is not one of ours.
        """
        if (wire := info.get(FIELD)) is None:
            return None
        audio_sha256, segment = wire
        if not _SHA256.fullmatch(audio_sha256):
            raise ValueError(f"{FIELD} does not hold a content address")
        return cls(audio_sha256=audio_sha256, segment=Segment(segment))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingNeed:
    """What a mode needs of one reference audio."""

    ref: SpeakerRef
    encoder_names: tuple[str, ...]
