"""What a scenario hands back: summaries of samples, and targets that judge them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STOCK = "stock"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        reference: What ours is divided by, named by ``versus``: stock unless it
            says otherwise.
        note: What a reader must know to read the line right.
        model: What was served; empty where nothing was.
    """

    scenario: str
    what: str
    unit: str
    ours: Summary
    reference: Summary | None = None
    versus: str = STOCK
    target: AtMost | AtLeast | RatioAtMost | None = None
    note: str = ""
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
