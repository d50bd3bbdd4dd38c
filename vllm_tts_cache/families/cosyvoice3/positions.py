"""Counts the tokens and mel frames of a clip without encoding it."""

import math

import numpy as np

TOKENIZER_RATE_HZ = 16_000
MEL_RATE_HZ = 24_000

_TOKENIZER_HOP = 160  # a frame of what the tokenizer reads; four of them are a token
_MEL_HOP = 480
MEL_FRAMES_PER_TOKEN = 2


def num_tokens(num_samples: int, sample_rate_hz: int) -> int:
    """Rows of ``speech_tokens`` for a clip at its own rate: 25 a second.

    The tokenizer halves its frames twice, and rounds up each time.
    """
    num_at_rate = num_resampled(num_samples, sample_rate_hz, TOKENIZER_RATE_HZ)
    num_frames = num_at_rate // _TOKENIZER_HOP
    return math.ceil(math.ceil(num_frames / 2) / 2)


def num_mel_frames(num_samples: int, sample_rate_hz: int) -> int:
    """Rows of ``mel`` for a clip at its own rate: 50 a second."""
    return num_resampled(num_samples, sample_rate_hz, MEL_RATE_HZ) // _MEL_HOP


def num_used_tokens(num_samples: int, sample_rate_hz: int) -> int:
    """Return how many tokens of a clip are used; the mel has two frames of each.

    The prompt's length is announced to the scheduler before the worker builds it, so
    this is exactly what `used_tokens` makes of the encodings.
    """
    return used_tokens(
        num_tokens(num_samples, sample_rate_hz),
        num_mel_frames(num_samples, sample_rate_hz),
    )


def used_tokens(num_tokens: int, num_mel_frames: int) -> int:
    """Return how many tokens have both their mel frames.

    Source: ``frontend_zero_shot`` of the official code.
    """
    return min(num_mel_frames // MEL_FRAMES_PER_TOKEN, num_tokens)


def num_resampled(num_samples: int, from_hz: int, to_hz: int) -> int:
    """Return how many samples torchaudio's resampler makes of so many.

    It rounds the quotient to float32 before it rounds it up.
    """
    if from_hz == to_hz:
        return num_samples
    divisor = math.gcd(from_hz, to_hz)
    exact = (to_hz // divisor) * num_samples / (from_hz // divisor)
    return math.ceil(np.float32(exact))
