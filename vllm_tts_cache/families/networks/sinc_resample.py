"""Resampling by torchaudio's default sinc filter, where it can.

It is what the host does for Fish Speech, and what the official CosyVoice3 does.
"""

import math
from functools import lru_cache

import soxr
import torch
import torchaudio
from torch import Tensor

from vllm_tts_cache.audio.reference import ReferenceAudio

# The kernel has an entry for every pair of input and output samples within the
# rates' common period. It is small for every rate that audio is recorded in, but at
# 44,101 Hz it would take 15 GB.
_KERNEL_MAX_ENTRIES = 2**22

# Part of the fingerprint of each encoder that resamples so.
RESAMPLER = f"torchaudio_sinc_hann/soxr_hq_above_{_KERNEL_MAX_ENTRIES}"


def resample(audio: ReferenceAudio, rate_hz: int, device: torch.device) -> Tensor:
    """The samples at ``rate_hz``: ``(num_samples,)`` float32 on ``device``."""
    samples, from_hz = audio.samples, audio.sample_rate_hz
    num_entries = _num_kernel_entries(from_hz, rate_hz)
    if num_entries > _KERNEL_MAX_ENTRIES:
        samples = soxr.resample(samples, from_hz, rate_hz, quality="HQ")
    # A copy, because the samples are read-only, which torch does not know.
    waveform = torch.tensor(samples, device=device)
    if from_hz == rate_hz or num_entries > _KERNEL_MAX_ENTRIES:
        return waveform
    return _kernel(from_hz, rate_hz, device)(waveform.unsqueeze(0)).squeeze(0)


def _num_kernel_entries(from_hz: int, to_hz: int) -> int:
    """About; the filter's six zero crossings to each side make the rest of it."""
    divisor = math.gcd(from_hz, to_hz)
    return (from_hz // divisor) * (to_hz // divisor)


# At most 16 MiB each.
@lru_cache(maxsize=16)
def _kernel(
    from_hz: int, to_hz: int, device: torch.device
) -> torchaudio.transforms.Resample:
    # It is computed on the CPU and in double precision, then moved, as by the host.
    with torch.device("cpu"):
        return torchaudio.transforms.Resample(from_hz, to_hz).to(device)
