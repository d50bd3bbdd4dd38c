"""How loud a clip is, and how much of it is cut off at the top."""

import threading

import numpy as np
import numpy.typing as npt
import pyloudnorm

from vllm_tts_cache.audio.limits import FULL_SCALE, clipped_share

# pyloudnorm's own default only comes near the filters of ITU-R BS.1770; these are they.
_FILTERS = "DeMan"
_BLOCK_SECONDS = 0.4  # of the standard's gate
# Of a clip that was made quieter after it had been cut off, the tops lie below full
# scale; of one that peaks below this, steps of 16 bits would look like tops.
_MIN_FLAT_PEAK = 0.1

# pyloudnorm silences warnings while it computes, which it does for the whole process:
# two threads at once could leave them silenced.
_METER = threading.Lock()


def loudness_lufs(
    samples: npt.NDArray[np.float64], sample_rate_hz: int
) -> float | None:
    """Integrated loudness by ITU-R BS.1770-4 of ``(num_samples,)`` mono audio.

    What is shorter than the standard's block of 0.4 s is repeated until it fills one.
    None if no block is above the standard's gate of -70 LUFS.
    """
    num_samples = max(samples.size, int(np.ceil(_BLOCK_SECONDS * sample_rate_hz)))
    filled = np.resize(samples, num_samples)
    with _METER:
        meter = pyloudnorm.Meter(sample_rate_hz, filter_class=_FILTERS)
        loudness = float(meter.integrated_loudness(filled))
    return loudness if np.isfinite(loudness) else None


def cut_off_share(samples: npt.NDArray[np.float32], peak: float) -> float:
    """Share of samples in flat tops, at full scale or at the clip's own peak."""
    if peak < _MIN_FLAT_PEAK:
        return 0.0
    return clipped_share(np.abs(samples) >= FULL_SCALE * min(peak, 1.0))
