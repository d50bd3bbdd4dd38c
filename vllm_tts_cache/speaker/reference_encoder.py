"""The protocol of the networks that turn reference audio into encodings."""

import math
from dataclasses import dataclass
from typing import Protocol

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.store.encoding import Encoding


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
