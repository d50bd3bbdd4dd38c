"""Clips to compare encodings with the official packages'."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile

Samples = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Clip:
    rate_hz: int
    num_samples: int
    num_channels: int = 1
    subtype: str = "PCM_16"

    @property
    def stem(self) -> str:
        return f"{self.rate_hz}-{self.num_samples}-{self.num_channels}-{self.subtype}"

    def write(self, directory: Path) -> Path:
        """Gliding harmonics over noise; each channel is its own."""
        rng = np.random.default_rng([self.rate_hz, self.num_samples])
        seconds = np.arange(self.num_samples) / self.rate_hz
        pitch_hz = rng.uniform(90, 220) + 15 * np.sin(2 * np.pi * 0.7 * seconds)
        phase = 2 * np.pi * np.cumsum(pitch_hz) / self.rate_hz
        voice = sum(np.sin(k * phase) / k for k in range(1, 9)) * 0.15
        noise = rng.standard_normal((self.num_samples, self.num_channels)) * 0.02
        path = directory / f"{self.stem}.wav"
        samples = (voice * self.loudness(seconds))[:, None] + noise
        soundfile.write(path, samples, self.rate_hz, subtype=self.subtype)
        return path

    def loudness(self, seconds: Samples) -> Samples:
        """How loud the harmonics are, over time."""
        return np.ones_like(seconds)
