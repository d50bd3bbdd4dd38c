"""The identity of what is stored."""

import hashlib
import re
from dataclasses import dataclass

from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.catalogue.stored_files import AUDIO_KIND
from vllm_tts_cache.errors import StorageError

__all__ = ["AUDIO_KIND", "EncodingKey", "Segment", "checked_address", "is_address"]

_ADDRESS = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingKey:
    """Everything that changes an encoding's bytes, and nothing else.

    Attributes:
        audio_sha256: Content address of the reference audio (rate and samples).
        encoder_fingerprint: Hex digest over all that changes what the encoder
            computes: weights, dtype, rates, resampler, attention, our revision.
            ``AUDIO_KIND`` for the stored form of the audio itself.
    """

    audio_sha256: str
    encoder_fingerprint: str

    @property
    def digest(self) -> str:
        """Hex SHA-256 of both parts; for logs and checks inside files."""
        canonical = f"{self.audio_sha256}/{self.encoder_fingerprint}"
        return hashlib.sha256(canonical.encode()).hexdigest()


def is_address(text: str) -> bool:
    """Whether it is 64 lower-case hex digits."""
    return _ADDRESS.fullmatch(text) is not None


def checked_address(text: str) -> str:
    """Return it; keys arrive over RPC, and none may name a path of its own choosing.

    Raises:
        StorageError: It is not 64 lower-case hex digits.
    """
    if not is_address(text):
        raise StorageError(f"Not a content address: {text[:80]!r}")
    return text
