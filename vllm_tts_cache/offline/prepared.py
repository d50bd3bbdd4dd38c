"""A clip that a batch job has prepared."""

from dataclasses import dataclass
from pathlib import Path

from vllm_tts_cache.speaker.modes import Mode
from vllm_tts_cache.speaker.ref import SpeakerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSpeaker:
    """A clip whose encodings exist.

    Attributes:
        clip: Its file; read again if the store has evicted it.
        ref: Its content address.
        mode: How it is cloned.
        ref_text: What is said in it, if the mode uses it.
        num_samples: At its own rate.
        sample_rate_hz: Of the clip.
    """

    clip: Path
    ref: SpeakerRef
    mode: Mode
    ref_text: str | None
    num_samples: int
    sample_rate_hz: int
