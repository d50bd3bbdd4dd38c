"""Reference clips of any length: 44.1 kHz, 16 bit, each unlike all others."""

import io
from functools import lru_cache

import numpy as np
import soundfile

SAMPLE_RATE_HZ = 44_100
TRANSCRIPT = "The keeper counts the ships at dusk, and writes each name into a book."


@lru_cache(maxsize=32)
def clip(seconds: float, seed: int) -> bytes:
    """WAV bytes: harmonics of a gliding pitch, in syllables, over a little noise."""
    random = np.random.default_rng(seed)
    t = np.arange(round(seconds * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    glide = random.uniform(90, 220) + 20 * np.sin(
        2 * np.pi * random.uniform(0.2, 1) * t
    )
    phase = 2 * np.pi * np.cumsum(glide) / SAMPLE_RATE_HZ
    loudness = random.uniform(0.2, 1.0, 12) / np.arange(1, 13)
    tone = sum(a * np.sin(k * phase) for k, a in enumerate(loudness, start=1))
    syllables = np.abs(np.sin(2 * np.pi * random.uniform(1.5, 3) * t)) + 0.05
    voice = tone * syllables + 0.01 * random.standard_normal(t.size)
    samples = 0.5 * voice / np.max(np.abs(voice))
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE_HZ, "PCM_16", format="WAV")
    return file.getvalue()
