"""How long a run will take, from how long runs took on two slow cores."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seconds:
    """What does not depend on the number of rounds, and each round."""

    fixed: float
    per_round: float = 0.0

    def total(self, num_rounds: int) -> float:
        return self.fixed + self.per_round * num_rounds


# Starting both servers at once, and stopping them.
SERVERS = Seconds(120)


def in_words(parts: Sequence[Seconds], num_rounds: int) -> str:
    total = sum(part.total(num_rounds) for part in parts)
    minutes = max(1, round(total / 60))
    return f"about {minutes} min on two slow cores that nobody else uses"
