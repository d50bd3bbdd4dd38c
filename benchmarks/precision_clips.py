"""Clips of known length for the precision of reference encoders."""

import io
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import soundfile

from benchmarks import clips
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """A reference audio, named for the table."""

    name: str
    audio: ReferenceAudio


@lru_cache(maxsize=32)
def synthetic(seconds: float, seed: int) -> ReferenceAudio:
    """Speech-like audio of any length; not decoded by us, which has an upper limit."""
    samples, rate_hz = soundfile.read(
        io.BytesIO(clips.clip(seconds, seed)), dtype="float32"
    )
    return ReferenceAudio.of(np.asarray(samples, np.float32), rate_hz)


def synthetic_clip(seconds: float) -> Clip:
    return Clip(f"{seconds:g} s", synthetic(seconds, 1))


def speech_clips() -> list[Clip]:
    """The two clips of synthetic speech that come with the package."""
    return [
        Clip(clip.path.stem, decode_path(clip.path).audio)
        for clip in (SPEECH, OTHER_SPEECH)
    ]
