"""The mel filter bank that librosa makes, which official front ends use."""

from functools import cache

import numpy as np
import numpy.typing as npt

# Slaney's auditory scale: linear below 1 kHz, logarithmic above.
_BREAK_HZ = 1000.0
_LINEAR_HZ_PER_MEL = 200.0 / 3.0
_LOG_STEP_PER_MEL = np.log(6.4) / 27.0
_BREAK_MEL = _BREAK_HZ / _LINEAR_HZ_PER_MEL


@cache
def mel_filters(
    sample_rate_hz: int, num_fft: int, num_mels: int, max_hz: float
) -> npt.NDArray[np.float32]:
    """Triangles of equal area from 0 to ``max_hz``: ``(num_mels, num_fft // 2 + 1)``.

    The host computes its filters in float32, which moves results by 1e-6 and more.

    Source: M. Slaney, Auditory Toolbox, 1998; the rounding is librosa's.
    """
    top_mel = _BREAK_MEL + np.log(max_hz / _BREAK_HZ) / _LOG_STEP_PER_MEL
    mels = np.linspace(0.0, top_mel, num_mels + 2)
    logarithmic = _BREAK_HZ * np.exp(_LOG_STEP_PER_MEL * (mels - _BREAK_MEL))
    edges_hz = np.where(mels < _BREAK_MEL, _LINEAR_HZ_PER_MEL * mels, logarithmic)
    bins_hz = np.fft.rfftfreq(num_fft, 1.0 / sample_rate_hz)
    left, centre, right = edges_hz[:-2, None], edges_hz[1:-1, None], edges_hz[2:, None]
    rising = (bins_hz - left) / (centre - left)
    falling = (right - bins_hz) / (right - centre)
    triangles = np.clip(np.minimum(rising, falling), 0.0, None).astype(np.float32)
    filters = (triangles * (2.0 / (right - left))).astype(np.float32)
    filters.flags.writeable = False
    return filters
