"""Counts the frames of a clip without encoding it, and without torch."""

import math

from vllm_tts_cache.families.networks.resample import num_resampled

# As released; `check_sizes` refuses others, as prompts announce their length by these.
SAMPLE_RATE_HZ = 24_000
SAMPLES_PER_FRAME = 960
NUM_CODEBOOKS = 8
CODEBOOK_SIZE = 1024

# HuBERT's features, at its rate of 16 kHz: two features make a frame.
_SAMPLES_PER_FEATURE = 320
_SAMPLES_OF_FIRST_FEATURE = 400
_SAMPLES_OF_SILENCE = 2 * 160
_FEATURES_PER_FRAME = 2


def num_frames(num_samples: int) -> int:
    """Return how many frames HuBERT's features of so many 24 kHz samples make."""
    num_heard = math.ceil(num_samples * 2 / 3) + _SAMPLES_OF_SILENCE
    after_first = max(num_heard - _SAMPLES_OF_FIRST_FEATURE, 0)
    num_features = after_first // _SAMPLES_PER_FEATURE + 1
    return -(-num_features // _FEATURES_PER_FRAME)


def num_clip_frames(num_samples: int, sample_rate_hz: int) -> int:
    """Return the frames of a clip at its own rate, which soxr resamples to 24 kHz."""
    return num_frames(num_resampled(num_samples, sample_rate_hz, SAMPLE_RATE_HZ))
