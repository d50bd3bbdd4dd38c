"""Samples, what is said of them, and the targets that judge them."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np

STOCK, OURS = "stock", "ours"
MIB = 1024**2
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Summary:
    """Samples of one quantity, all in the row's unit.

    Raises: ValueError if there are none, or one is not finite.
    """

    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples or not all(map(math.isfinite, self.samples)):
            raise ValueError(f"samples must be finite and at least one: {self.samples}")

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Summary":
        return cls(tuple(map(float, samples)))

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    @property
    def iqr(self) -> float:
        """Distance between the quartiles; 0 for a single sample."""
        low, high = np.percentile(self.samples, (25, 75))
        return float(high - low)


@dataclass(frozen=True, slots=True)
class AtMost:
    """Judges the median of ours."""

    limit: float

    def is_met(self, ours: Summary, _reference: Summary | None) -> bool | None:
        return ours.median <= self.limit

    def __str__(self) -> str:
        return f"<= {self.limit:g}"


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Judges the median of ours."""

    limit: float

    def is_met(self, ours: Summary, _reference: Summary | None) -> bool | None:
        return ours.median >= self.limit

    def __str__(self) -> str:
        return f">= {self.limit:g}"


@dataclass(frozen=True, slots=True)
class RatioAtMost:
    """Judges the median of ours against the reference's; None without one."""

    limit: float

    def is_met(self, ours: Summary, reference: Summary | None) -> bool | None:
        if reference is None or reference.median <= 0:
            return None
        return ours.median / reference.median <= self.limit

    def __str__(self) -> str:
        return f"<= {self.limit:g}x"


@dataclass(frozen=True, slots=True)
class DifferenceAtMost:
    """Judges what the median of ours adds to the reference's; None without one."""

    limit: float

    def is_met(self, ours: Summary, reference: Summary | None) -> bool | None:
        return (
            None if reference is None else ours.median - reference.median <= self.limit
        )

    def __str__(self) -> str:
        return f"<= +{self.limit:g}"


@dataclass(frozen=True, slots=True)
class Point:
    """Where a row lies in a picture.

    Attributes:
        picture: File name without its ending.
        line: What connects the rows that belong together.
        at: Its place on the horizontal axis; None where the samples themselves are
            drawn.
    """

    picture: str
    line: str
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        reference: What ours is divided by, named by ``versus``: stock unless it
            says otherwise.
        no_stock: Why stock has no figure, where a reader would look for one.
        note: What a reader must know to read the line right.
        point: Where it is drawn, if it is.
        scenario: Whose row it is; the run fills it in, and the model.
        model: What was served; empty where nothing was.
    """

    what: str
    unit: str
    ours: Summary
    reference: Summary | None = None
    _: KW_ONLY
    versus: str = STOCK
    target: AtMost | AtLeast | RatioAtMost | DifferenceAtMost | None = None
    no_stock: str = ""
    note: str = ""
    point: Point | None = None
    scenario: str = ""
    model: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the reference, medians; None where that says nothing."""
        if self.reference is None or self.reference.median <= 0:
            return None
        return self.ours.median / self.reference.median

    @property
    def is_met(self) -> bool | None:
        """None without a target, or where it cannot be judged."""
        return self.target.is_met(self.ours, self.reference) if self.target else None


def percentile(samples: Sequence[float], share: float) -> float:
    """The ``share`` percentile (0 to 100), interpolated."""
    return float(np.percentile(samples, share))


def in_fresh_process(module: str, *arguments: object) -> dict[str, Any]:
    """Run ``python -m module``; its last line of output is JSON, which is returned.

    For what needs a process that nothing else has touched, such as its memory.

    Raises: RuntimeError with the end of its error output if it fails.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, check=False, cwd=_ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{module}: {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])
