"""When torchaudio's sinc filter is too large to be made, and what is done instead."""

import math

import numpy as np
import numpy.typing as npt
import soxr

# It has an entry for every pair of input and output samples within the rates' common
# period. It is small for every rate that audio is recorded in, but at 44,101 Hz it
# would take gigabytes.
MAX_ENTRIES = 2**22

# Part of the fingerprint of each encoder that resamples by it.
INSTEAD = f"soxr_hq_above_{MAX_ENTRIES}"


def is_too_large(from_hz: int, to_hz: int) -> bool:
    """Tell by about how many entries it has.

    Its six zero crossings to each side make the rest of it.
    """
    divisor = math.gcd(from_hz, to_hz)
    return (from_hz // divisor) * (to_hz // divisor) > MAX_ENTRIES


def resample_without(
    samples: npt.NDArray[np.float32], from_hz: int, to_hz: int
) -> npt.NDArray[np.float32]:
    """Resample by soxr, which makes no filter for a pair of rates."""
    return soxr.resample(samples, from_hz, to_hz, quality="HQ")
