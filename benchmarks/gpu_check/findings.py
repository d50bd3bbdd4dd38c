"""What a check found, as a row of the table and of the file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from rich.markup import escape
from rich.table import Table


class Verdict(Enum):
    OK = "ok"
    FAILS = "fails"
    MEASURED = "measured"  # there is nothing that it must be

    @classmethod
    def of(cls, is_right: bool) -> "Verdict":
        return cls.OK if is_right else cls.FAILS


_STYLES = {Verdict.OK: "green", Verdict.FAILS: "bold red", Verdict.MEASURED: "cyan"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check of one encoder.

    Attributes:
        found: For people.
        expected: For people; empty where nothing is.
        values: The figures behind it, for a file.
    """

    family: str
    encoder: str
    check: str
    found: str
    verdict: Verdict
    expected: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict.value}


def table(findings: Sequence[Finding], title: str) -> Table:
    drawn = Table(title=title, title_justify="left")
    for column in ("family", "encoder", "check", "found", "expected", ""):
        drawn.add_column(column, overflow="fold")
    for one in findings:
        verdict = f"[{_STYLES[one.verdict]}]{one.verdict.value}[/]"
        found = escape(one.found)  # an error may be in it
        drawn.add_row(one.family, one.encoder, one.check, found, one.expected, verdict)
    return drawn
