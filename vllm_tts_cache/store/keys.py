"""The identity of an encoding."""

import hashlib
from dataclasses import dataclass

from vllm_tts_cache.catalogue.segment import Segment

__all__ = ["EncodingKey", "Segment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingKey:
    """Everything that changes an encoding's bytes, and nothing else.

    Attributes:
        audio_sha256: Content address of the reference audio (rate and samples).
        encoder_fingerprint: Hex digest over all that changes what the encoder
            computes: weights, dtype, rates, resampler, attention, our revision.
    """

    audio_sha256: str
    encoder_fingerprint: str

    @property
    def digest(self) -> str:
        """Hex SHA-256 of both parts; for logs and checks inside files."""
        canonical = f"{self.audio_sha256}/{self.encoder_fingerprint}"
        return hashlib.sha256(canonical.encode()).hexdigest()
