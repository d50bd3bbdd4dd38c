"""What a scenario gets: two sides, how much to measure, where to say how far it is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TypeVar

from benchmarks.models import QWEN3_TTS, Model
from benchmarks.sides import Sides

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
    """

    num_rounds: int
    is_quick: bool
    work: Path
    step: Callable[[str], None]
    model: Model = QWEN3_TTS
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
