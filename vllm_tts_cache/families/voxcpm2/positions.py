"""Counts the prompt positions of a reference without encoding it."""

from vllm_tts_cache.families.networks.resample import num_resampled

# As released; `read_encoder_sizes` refuses a checkpoint with other values.
SAMPLE_RATE_HZ = 16_000
SAMPLES_PER_LATENT = 640
LATENTS_PER_POSITION = 4  # a patch
SAMPLES_PER_POSITION = SAMPLES_PER_LATENT * LATENTS_PER_POSITION


def num_positions(num_samples: int, sample_rate_hz: int) -> int:
    """Return the rows of either encoder's ``features`` for a clip at its own rate.

    The scheduler gets the prompt's length before the worker builds the prompt, and a
    prompt of another length ends the engine. So this rounds exactly as the resampler
    does.
    """
    num_resampled_samples = num_resampled(num_samples, sample_rate_hz, SAMPLE_RATE_HZ)
    return -(-num_resampled_samples // SAMPLES_PER_POSITION)
