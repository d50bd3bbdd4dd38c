"""Resampling by torchaudio's default sinc filter, by its class or its function.

The class makes the filter in float64, as the host does for Fish Speech and the official
CosyVoice3; the function makes it in float32, which gives other samples.
"""

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import soxr
import torch
import torchaudio
from torch import Tensor

from vllm_tts_cache.audio.reference import ReferenceAudio

# The filter has an entry for every pair of input and output samples within the rates'
# common period. It is small for every rate that audio is recorded in, but at 44,101 Hz
# it would take gigabytes, so soxr resamples there, which needs no such filter.
MAX_ENTRIES = 2**22

# Part of the fingerprint of each encoder that resamples by the class or the function.
_FALLBACK = f"soxr_hq_above_{MAX_ENTRIES}"
RESAMPLER = f"torchaudio_sinc_hann/{_FALLBACK}"
FUNCTION_RESAMPLER = f"torchaudio_functional_hann/{_FALLBACK}"


def resample(audio: ReferenceAudio, rate_hz: int, device: torch.device) -> Tensor:
    """Return the samples at ``rate_hz`` by the class: ``(num_samples,)``, on device."""
    samples, from_hz = audio.samples, audio.sample_rate_hz
    is_too_large = _is_too_large(from_hz, rate_hz)
    if is_too_large:
        samples = soxr.resample(samples, from_hz, rate_hz, quality="HQ")
    # A copy, because the samples are read-only, which torch does not know.
    waveform = torch.tensor(samples, device=device)
    if from_hz == rate_hz or is_too_large:
        return waveform
    return _kernel(from_hz, rate_hz, device)(waveform.unsqueeze(0)).squeeze(0)


def resample_by_function(
    audio: ReferenceAudio, rate_hz: int
) -> npt.NDArray[np.float32]:
    """Return the samples at ``rate_hz`` by the function, computed on the CPU.

    They are ``(num_samples,)`` float32, and read-only if the rates are equal.
    """
    samples, from_hz = audio.samples, audio.sample_rate_hz
    if from_hz == rate_hz:
        return samples
    if _is_too_large(from_hz, rate_hz):
        return soxr.resample(samples, from_hz, rate_hz, quality="HQ")
    # A copy, because the samples are read-only, which torch does not know.
    waveform = torch.tensor(samples, device="cpu").unsqueeze(0)
    return torchaudio.functional.resample(waveform, from_hz, rate_hz)[0].numpy()


def _is_too_large(from_hz: int, to_hz: int) -> bool:
    """Tell whether the filter has too many entries, estimated by the rates alone.

    The entries for its six zero crossings on each side are not counted.
    """
    divisor = math.gcd(from_hz, to_hz)
    return (from_hz // divisor) * (to_hz // divisor) > MAX_ENTRIES


# At most 16 MiB each.
@lru_cache(maxsize=16)
def _kernel(
    from_hz: int, to_hz: int, device: torch.device
) -> torchaudio.transforms.Resample:
    # It is computed on the CPU and in double precision, then moved, as by the host.
    with torch.device("cpu"):
        return torchaudio.transforms.Resample(from_hz, to_hz).to(device)
