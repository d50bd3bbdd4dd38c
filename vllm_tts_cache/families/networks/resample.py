"""Resampling as librosa does by default, which official packages call."""

import math

import numpy as np
import numpy.typing as npt
import soxr

from vllm_tts_cache.audio.reference import ReferenceAudio

# Part of the fingerprint of each encoder that calls `resample`.
RESAMPLER = "soxr_hq"


def resample(audio: ReferenceAudio, rate_hz: int) -> npt.NDArray[np.float32]:
    """Return the samples at ``rate_hz``, as librosa's default resampler gives them.

    They are ``(num_samples,)`` float32, and read-only if the rates are equal.

    Source: librosa 0.11, ``librosa.resample``.
    """
    if audio.sample_rate_hz == rate_hz:
        return audio.samples
    num_samples = num_resampled(audio.num_samples, audio.sample_rate_hz, rate_hz)
    resampled = soxr.resample(
        audio.samples, audio.sample_rate_hz, rate_hz, quality="HQ"
    )[:num_samples]
    return np.pad(resampled, (0, num_samples - resampled.size))


def num_resampled(num_samples: int, from_hz: int, to_hz: int) -> int:
    """Return how many samples `resample` makes of so many.

    It divides first, in floating point, as librosa does: at 44.1 kHz some lengths are
    one sample longer than in exact arithmetic, and that changes encodings.
    """
    if from_hz == to_hz:
        return num_samples
    return math.ceil(num_samples * (to_hz / from_hz))
