"""What a look at something found."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        status: ``fail`` keeps the plugin from working, ``warn`` may surprise somebody.
        text: What is there.
        hint: What to do about it; empty if nothing is to be done.
    """

    name: str
    status: Status
    text: str
    hint: str = ""

    def plain(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def ok(name: str, text: str) -> Finding:
    """Nothing is to be done."""
    return Finding(name, "ok", text)


def warn(name: str, text: str, hint: str) -> Finding:
    """It may surprise somebody."""
    return Finding(name, "warn", text, hint)


def fail(name: str, text: str, hint: str) -> Finding:
    """It does not work so."""
    return Finding(name, "fail", text, hint)


def median_ms(call: Callable[[], object], times: int) -> float:
    """The median time of a call, in milliseconds; the first one does not count."""
    call()
    spent: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        spent.append(1000 * (time.perf_counter() - began))
    return statistics.median(spent)
