"""How many codec frames a reference makes; known without encoding it."""

from vllm_tts_cache.families.networks.resample import num_resampled

# The 12 Hz codec, the only one that a checkpoint we load may have.
CODEC_RATE_HZ = 24_000
SAMPLES_PER_FRAME = 1_920


def num_codec_frames(num_samples: int, sample_rate_hz: int) -> int:
    """Frames of a clip with ``num_samples`` at its own rate.

    The prompt's length is announced to the scheduler before the worker builds it; a
    frame too few would cut off its end. So this rounds exactly as the resampler does.
    """
    num_resampled_samples = num_resampled(num_samples, sample_rate_hz, CODEC_RATE_HZ)
    return -(-num_resampled_samples // SAMPLES_PER_FRAME)
