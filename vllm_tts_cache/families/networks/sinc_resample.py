"""Resampling by torchaudio's default sinc filter, where it can.

It is what the host does for Fish Speech, and what the official CosyVoice3 does.
"""

from functools import lru_cache

import torch
import torchaudio
from torch import Tensor

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.families.networks import sinc_filter

# Part of the fingerprint of each encoder that resamples so.
RESAMPLER = f"torchaudio_sinc_hann/{sinc_filter.INSTEAD}"


def resample(audio: ReferenceAudio, rate_hz: int, device: torch.device) -> Tensor:
    """The samples at ``rate_hz``: ``(num_samples,)`` float32 on ``device``."""
    samples, from_hz = audio.samples, audio.sample_rate_hz
    is_too_large = sinc_filter.is_too_large(from_hz, rate_hz)
    if is_too_large:
        samples = sinc_filter.resample_without(samples, from_hz, rate_hz)
    # A copy, because the samples are read-only, which torch does not know.
    waveform = torch.tensor(samples, device=device)
    if from_hz == rate_hz or is_too_large:
        return waveform
    return _kernel(from_hz, rate_hz, device)(waveform.unsqueeze(0)).squeeze(0)


# At most 16 MiB each.
@lru_cache(maxsize=16)
def _kernel(
    from_hz: int, to_hz: int, device: torch.device
) -> torchaudio.transforms.Resample:
    # It is computed on the CPU and in double precision, then moved, as by the host.
    with torch.device("cpu"):
        return torchaudio.transforms.Resample(from_hz, to_hz).to(device)
