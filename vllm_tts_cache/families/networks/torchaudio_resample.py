"""Resampling as torchaudio.functional.resample does, which official packages call."""

import math

import numpy as np
import numpy.typing as npt
import soxr
import torch
from torchaudio.functional import resample as torchaudio_resample

from vllm_tts_cache.audio.reference import ReferenceAudio

# The filter has an entry for every pair of input and output samples within the rates'
# common period. It is small for every rate that audio is recorded in, but at 44,101 Hz
# it would take gigabytes, anew for each clip.
_FILTER_MAX_ENTRIES = 2**22

# Part of the fingerprint of each encoder that resamples so. In float32, filter and all;
# torchaudio's own class makes the filter in float64, and other samples with it.
RESAMPLER = f"torchaudio_functional_hann/soxr_hq_above_{_FILTER_MAX_ENTRIES}"


def resample(audio: ReferenceAudio, rate_hz: int) -> npt.NDArray[np.float32]:
    """The samples at ``rate_hz``, computed on the CPU.

    Returns:
        ``(num_samples,)`` float32; read-only if nothing had to be done.
    """
    samples, from_hz = audio.samples, audio.sample_rate_hz
    if from_hz == rate_hz:
        return samples
    if _num_entries(from_hz, rate_hz) > _FILTER_MAX_ENTRIES:
        return soxr.resample(samples, from_hz, rate_hz, quality="HQ")
    # A copy, because the samples are read-only, which torch does not know.
    waveform = torch.tensor(samples, device="cpu").unsqueeze(0)
    return torchaudio_resample(waveform, from_hz, rate_hz)[0].numpy()


def _num_entries(from_hz: int, to_hz: int) -> int:
    """About; the filter's six zero crossings to each side make the rest of it."""
    divisor = math.gcd(from_hz, to_hz)
    return (from_hz // divisor) * (to_hz // divisor)
