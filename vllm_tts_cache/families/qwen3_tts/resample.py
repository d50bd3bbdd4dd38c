"""Resampling exactly as the official package does."""

import math

import numpy as np
import numpy.typing as npt
import soxr

from vllm_tts_cache.audio.reference import ReferenceAudio

# Part of each encoder's fingerprint.
RESAMPLER = "soxr_hq"


def resample(audio: ReferenceAudio, rate_hz: int) -> npt.NDArray[np.float32]:
    """The samples at ``rate_hz``, as librosa's default resampler gives them.

    Returns:
        ``(num_samples,)`` float32; read-only if nothing had to be done.

    Source: librosa 0.11, ``librosa.resample``, which qwen-tts calls.
    """
    if audio.sample_rate_hz == rate_hz:
        return audio.samples
    # In floating point, and with the quotient first: at 44.1 kHz some lengths come
    # out one sample longer than exact arithmetic has it, and the codec hears that.
    num_samples = math.ceil(audio.num_samples * (rate_hz / audio.sample_rate_hz))
    resampled = soxr.resample(
        audio.samples, audio.sample_rate_hz, rate_hz, quality="HQ"
    )[:num_samples]
    return np.pad(resampled, (0, num_samples - resampled.size))
