"""What a scenario gets: two sides, how much to measure, texts and clips for them."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import TypeVar

import numpy as np
import soundfile

from benchmarks.models import Model, models
from benchmarks.sides import Sides

SAMPLE_RATE_HZ = 44_100
_WORDS = ("tide", "harbour", "lantern", "bread", "window", "river", "stone", "letter")

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Bench:
    """One run.

    Attributes:
        num_rounds: Turns of each side; a round's figure is one sample where it is
            a percentile, else each request is one.
        is_quick: Less of everything, see `pick`.
        work: A directory to fill.
        step: Called with what comes next, for the progress bar.
        model: What is served.
        sizes: Scenario -> how much of it, where the command line says so.
    """

    num_rounds: int
    is_quick: bool
    work: Path
    step: Callable[[str], None]
    model: Model = field(default_factory=lambda: models()[0])
    sizes: Mapping[str, int] = field(default_factory=dict)
    _sides: Sides | None = None
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    @property
    def sides(self) -> Sides:
        assert self._sides is not None, "this scenario did not say that it needs them"
        return self._sides

    def use(self, model: Model, sides: Sides | None) -> None:
        self.model, self._sides = model, sides

    def pick(self, *, full: T, quick: T) -> T:
        """What this run does, of the two."""
        return quick if self.is_quick else full

    def size(self, scenario: str, *, full: int, quick: int) -> int:
        """How much of a scenario whose size can be asked for."""
        return self.sizes.get(scenario, self.pick(full=full, quick=quick))

    @property
    def modes(self) -> tuple[str, ...]:
        """The clone modes of this run: all, or the cheapest."""
        every = tuple(self.model.modes)
        return self.pick(full=every, quick=every[:1])

    @property
    def fullest_mode(self) -> str:
        """The one that needs most of the reference."""
        return self.modes[-1]

    def number(self) -> int:
        """One that was not given out before: seeds of clips, parts of names."""
        return next(self._numbers)

    def short_text(self) -> str:
        """A text that no request had before, spoken in a second or two."""
        return f"Number {self.number():05d}."

    def text(self, num_sentences: int) -> str:
        """A text that no request had before, of a length that hardly varies."""
        sentences = []
        for _ in range(num_sentences):
            number = self.number()
            first, second = _WORDS[number % 8], _WORDS[number // 8 % 8]
            sentences.append(f"The {first} by the {second} is number {number:05d}.")
        return " ".join(sentences)


@lru_cache(maxsize=32)
def clip(seconds: float, seed: int) -> bytes:
    """A reference clip, unlike that of any other seed: 44.1 kHz, 16 bit, WAV.

    Harmonics of a gliding pitch, in syllables, over a little noise.
    """
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
