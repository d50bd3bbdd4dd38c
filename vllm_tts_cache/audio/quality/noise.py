"""How loud the noise of a clip is, and how far the speech stands above it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tts_cache.audio.quality.speech import Speech

_FRAMES_PER_SECOND = 50
# A room answers for as long, and a word is fading: that is no noise yet.
_FADES_SECONDS = 0.1
_MIN_NOISE_FRAMES = 5  # 0.1 s
_QUIETEST = 10  # one frame in so many

# Digital silence is no noise at all; and noise may be all there is.
MAX_SNR_DB = 80.0
MIN_SNR_DB = -20.0
_FLOOR_POWER = 1e-20


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise in a clip.

    Attributes:
        level_dbfs: RMS of the parts where nobody speaks, at their median.
        snr_db: How far the RMS of the speech, less the noise, lies above it, within
            ``MIN_SNR_DB`` and ``MAX_SNR_DB``; None without speech.
    """

    level_dbfs: float
    snr_db: float | None


def noise_of(
    samples: npt.NDArray[np.float32], sample_rate_hz: int, speech: Speech
) -> Noise:
    """Estimate the noise of ``(num_samples,)`` audio.

    Where nobody ever pauses, the quietest tenth of the clip stands for the noise: that
    is more than there is, rather than less.
    """
    size = min(samples.size, sample_rate_hz // _FRAMES_PER_SECOND)
    frames = samples[: samples.size // size * size].reshape(-1, size)
    power = np.var(frames, axis=1, dtype=np.float64)
    centres = (np.arange(power.size) + 0.5) * size / sample_rate_hz
    noise = _noise_power(power, speech.covers(centres, _FADES_SECONDS))
    spoken = power[speech.covers(centres)]
    if spoken.size == 0:
        return Noise(_db(noise), None)
    snr_db = _db(float(np.mean(spoken)) - noise) - _db(noise)
    return Noise(_db(noise), min(max(snr_db, MIN_SNR_DB), MAX_SNR_DB))


def _noise_power(power: npt.NDArray[np.float64], near: npt.NDArray[np.bool_]) -> float:
    apart = power[~near]
    if apart.size >= _MIN_NOISE_FRAMES:
        # Not the mean, which one breath or one click would decide.
        return float(np.median(apart))
    quietest = max(1, power.size // _QUIETEST)
    return float(np.mean(np.sort(power)[:quietest]))


def _db(power: float) -> float:
    return float(10 * np.log10(max(power, _FLOOR_POWER)))
