"""Counts the codec frames of a reference without encoding it."""

from vllm_tts_cache.families.networks.resample import num_resampled

# The 12 Hz codec, the only one that a checkpoint we load may have.
CODEC_RATE_HZ = 24_000
SAMPLES_PER_FRAME = 1_920


def num_codec_frames(num_samples: int, sample_rate_hz: int) -> int:
    """Return the frames of a clip with ``num_samples`` at its own rate.

    The scheduler gets the prompt's length before the worker builds the prompt, and one
    frame too few would cut its end off. So this rounds exactly as the resampler does.
    """
    num_resampled_samples = num_resampled(num_samples, sample_rate_hz, CODEC_RATE_HZ)
    return -(-num_resampled_samples // SAMPLES_PER_FRAME)
