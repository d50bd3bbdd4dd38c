"""How a request names its speaker: the one thing that crosses from API to worker."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_tts_cache.catalogue.record import Segment

# In the host's additional_information; of a diffusion model, in the prompt itself.
FIELD = "tts_cache_speaker"
# There too: as the API process calls the request. Such a model is not told otherwise.
REQUEST_FIELD = "tts_cache_request"
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
