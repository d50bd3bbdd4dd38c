"""How many prompt positions a reference takes; known without encoding it."""

from vllm_tts_cache.families.networks.resample import num_resampled

# As released; the loader refuses a checkpoint that says otherwise.
SAMPLE_RATE_HZ = 16_000
SAMPLES_PER_LATENT = 640
LATENTS_PER_POSITION = 4  # a patch
SAMPLES_PER_POSITION = SAMPLES_PER_LATENT * LATENTS_PER_POSITION


def num_positions(num_samples: int, sample_rate_hz: int) -> int:
    """Rows of either encoder's ``features`` for a clip at its own rate.

    The prompt's length is announced to the scheduler before the worker builds it, and
    a prompt of another length ends the engine. So this rounds exactly as the resampler
    does.
    """
    num_resampled_samples = num_resampled(num_samples, sample_rate_hz, SAMPLE_RATE_HZ)
    return -(-num_resampled_samples // SAMPLES_PER_POSITION)
