"""Clips to encode, and files of them to compare with the official packages."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from vllm_tts_cache.audio.reference import ReferenceAudio


@dataclass(frozen=True)
class Clip:
    """Gliding harmonics over noise; each channel is its own.

    ``level`` is that of the voice, ``floor`` that of the noise, in ``pauses`` too:
    where the voice is silent, in seconds.
    """

    rate_hz: int
    num_samples: int
    num_channels: int = 1
    subtype: str = "PCM_16"
    level: float = 0.15
    floor: float = 0.02
    pauses: tuple[tuple[float, float], ...] = ()

    @property
    def stem(self) -> str:
        pauses = "".join(f"_{start}-{end}" for start, end in self.pauses)
        kind = f"{self.num_channels}-{self.subtype}-{self.level}-{self.floor}"
        return f"{self.rate_hz}-{self.num_samples}-{kind}{pauses}"

    def write(self, directory: Path) -> Path:
        rng = np.random.default_rng([self.rate_hz, self.num_samples])
        seconds = np.arange(self.num_samples) / self.rate_hz
        pitch_hz = rng.uniform(90, 220) + 15 * np.sin(2 * np.pi * 0.7 * seconds)
        phase = 2 * np.pi * np.cumsum(pitch_hz) / self.rate_hz
        sines = [np.sin(k * phase) / k for k in range(1, 9)]
        voice = np.asarray(sum(sines)) * self.level
        for start, end in self.pauses:
            voice[round(start * self.rate_hz) : round(end * self.rate_hz)] = 0.0
        noise = rng.standard_normal((self.num_samples, self.num_channels)) * self.floor
        path = directory / f"{self.stem}.wav"
        samples = (voice[:, None] + noise).clip(-0.99, 0.99)
        soundfile.write(path, samples, self.rate_hz, subtype=self.subtype)
        return path


def noisy_tone(num_samples: int, rate_hz: int = 16_000, seed=0) -> ReferenceAudio:
    """Another one by each seed."""
    rng = np.random.default_rng(seed)
    tone = np.sin(2 * np.pi * (150 + 40 * seed) * np.arange(num_samples) / rate_hz)
    samples = 0.2 * tone + 0.05 * rng.standard_normal(num_samples)
    return ReferenceAudio.of(samples.astype(np.float32), rate_hz)
