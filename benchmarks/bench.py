"""What a scenario gets: two sides, how much to measure, where to say how far it is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from benchmarks.sides import Sides

_WORDS = ("tide", "harbour", "lantern", "bread", "window", "river", "stone", "letter")


@dataclass(slots=True, kw_only=True)
class Bench:
    """One run.

    Attributes:
        num_rounds: Turns of each side; a round's figure is one sample where it is
            a percentile, else each request is one.
        is_quick: Fewer requests a round.
        work: A directory to fill.
        step: Called with what comes next, for the progress bar.
    """

    num_rounds: int
    is_quick: bool
    work: Path
    step: Callable[[str], None]
    _sides: Sides | None = None
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    @property
    def sides(self) -> Sides:
        assert self._sides is not None, "this scenario did not say that it needs them"
        return self._sides

    def use(self, sides: Sides) -> None:
        self._sides = sides

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
