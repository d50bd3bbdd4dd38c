"""Reference audio for the checks: nobody's voice."""

import numpy as np

from vllm_tts_cache.audio.reference import ReferenceAudio

RATE_HZ = 44_100


def noise(seconds: float, seed: int = 0) -> ReferenceAudio:
    """A clip of so many seconds; equal arguments give equal clips."""
    random = np.random.default_rng(seed)
    samples = random.uniform(-0.3, 0.3, round(seconds * RATE_HZ))
    return ReferenceAudio.of(samples.astype(np.float32), RATE_HZ)
