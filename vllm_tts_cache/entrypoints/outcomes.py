"""What the speakers of one HTTP request found: the header, and the true error."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

CacheOutcome = Literal["hit", "miss", "none"]

HEADER = "X-Speaker-Cache"


@dataclass(slots=True, eq=False)
class Outcomes:
    """What the speakers of one HTTP request (a batch has several) found.

    Attributes:
        error: Why the last of them failed, before the host rewords it.
    """

    seen: list[CacheOutcome] = field(default_factory=list)
    error: Exception | None = None

    def header(self) -> str:
        """``miss`` if any was encoded, ``hit`` if all were there, else ``none``."""
        return min(self.seen, key=["miss", "hit", "none"].index, default="none")


# A context variable, because the host's serving class calls through several layers
# between our two ends, and runs several requests of a batch beside each other.
_outcomes: ContextVar[Outcomes | None] = ContextVar("speaker_outcomes", default=None)


@contextmanager
def observe_outcomes() -> Iterator[Outcomes]:
    """Collect the outcomes of what runs inside."""
    outcomes = Outcomes()
    token = _outcomes.set(outcomes)
    try:
        yield outcomes
    finally:
        _outcomes.reset(token)


def report(outcome: CacheOutcome) -> None:
    """Tell whoever observes."""
    if (outcomes := _outcomes.get()) is not None:
        outcomes.seen.append(outcome)


def report_error(error: Exception) -> bool:
    """Tell whoever observes why the request failed; False if nobody does."""
    if (outcomes := _outcomes.get()) is None:
        return False
    outcomes.error = error
    return True
