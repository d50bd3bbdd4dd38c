"""Resampling as torchaudio.functional.resample does, which official packages call."""

import numpy as np
import numpy.typing as npt
import torch
from torchaudio.functional import resample as torchaudio_resample

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.families.networks import sinc_filter

# Part of the fingerprint of each encoder that resamples so. In float32, filter and all;
# torchaudio's own class makes the filter in float64, and other samples with it.
RESAMPLER = f"torchaudio_functional_hann/{sinc_filter.INSTEAD}"


def resample(audio: ReferenceAudio, rate_hz: int) -> npt.NDArray[np.float32]:
    """The samples at ``rate_hz``, computed on the CPU.

    Returns:
        ``(num_samples,)`` float32; read-only if nothing had to be done.
    """
    samples, from_hz = audio.samples, audio.sample_rate_hz
    if from_hz == rate_hz:
        return samples
    if sinc_filter.is_too_large(from_hz, rate_hz):
        return sinc_filter.resample_without(samples, from_hz, rate_hz)
    # A copy, because the samples are read-only, which torch does not know.
    waveform = torch.tensor(samples, device="cpu").unsqueeze(0)
    return torchaudio_resample(waveform, from_hz, rate_hz)[0].numpy()
