"""Up to which frequency a clip holds anything, whatever its sample rate promises."""

import numpy as np
import numpy.typing as npt

from vllm_tts_cache.audio.quality.speech import Speech

_BIN_HZ = 25
_BAND_HZ = 250
# Against the strongest band. Speech itself falls by 30 to 45 dB towards 16 kHz; what a
# good resampler leaves above the old rate's half lies 80 dB below and more.
_MIN_POWER = 1e-6  # -60 dB


def bandwidth_hz(
    samples: npt.NDArray[np.float32], sample_rate_hz: int, speech: Speech
) -> int | None:
    """The upper edge of the highest band of 250 Hz with energy, while somebody speaks.

    None for audio that is silent, or shorter than 40 ms. Noise is energy as well.
    """
    size = sample_rate_hz // _BIN_HZ
    frames = samples[: samples.size // size * size].reshape(-1, size)
    centres = (np.arange(len(frames)) + 0.5) * size / sample_rate_hz
    spoken = speech.covers(centres)
    power = _mean_power(frames[spoken] if spoken.any() else frames)
    per_band = _BAND_HZ // _BIN_HZ
    bands = power[1 : 1 + (power.size - 1) // per_band * per_band]
    # Not the mean, which one whistling tone would decide.
    level = np.median(bands.reshape(-1, per_band), axis=1)
    (held,) = np.nonzero((level > 0) & (level >= level.max(initial=0) * _MIN_POWER))
    return int(held[-1] + 1) * _BAND_HZ if held.size else None


def _mean_power(frames: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """``(num_bins,)``, the first of them at 0 Hz."""
    num_frames, size = frames.shape
    if num_frames == 0:
        return np.zeros(1)
    spectra = np.fft.rfft(frames * np.hanning(size).astype(np.float32), axis=1)
    return np.mean(np.abs(spectra).astype(np.float64) ** 2, axis=0)
