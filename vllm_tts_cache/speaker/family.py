"""What every model family brings: its reference encoders, and which a mode needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.store.encoding import Encoding


class CloneMode(str, Enum):
    """How a speaker is cloned."""

    X_VECTOR = "x_vector"
    IN_CONTEXT = "in_context"

    @classmethod
    def of(cls, *, in_context: bool) -> "CloneMode":
        """The mode of a request that says whether it clones in context."""
        return cls.IN_CONTEXT if in_context else cls.X_VECTOR


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family, described without loading it.

    Attributes:
        name: As in fingerprints and metrics.
        encoders: Names of the reference encoders whose encodings a mode needs; a
            mode that is not there is one that the family does not have.
    """

    name: str
    encoders: Mapping[CloneMode, tuple[str, ...]]

    @property
    def clones_from_embeddings(self) -> bool:
        """Whether it has the x-vector mode, and so takes raw speaker embeddings."""
        return CloneMode.X_VECTOR in self.encoders

    def precomputed(self, *, has_transcript: bool) -> tuple[str, ...]:
        """Encoders that a voice registered with or without a transcript needs.

        A family that clones in context only needs the same for both: the transcript
        may come with the request.
        """
        mode = CloneMode.of(in_context=has_transcript)
        return self.encoders.get(mode, self.encoders[CloneMode.IN_CONTEXT])


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
        """64 lowercase hex digits; equal only if every encoding is the same bytes."""
        ...

    @property
    def bytes_per_second(self) -> int:
        """Device memory that a second of audio takes while it is encoded, at most."""
        ...

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio; safe to call from any thread, several at once included.

        Raises:
            EncodeError: The network failed on this audio.
        """
        ...
