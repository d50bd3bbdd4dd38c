"""What a run says: one JSON file, named by day and revision, and one table."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks import machine
from benchmarks.measure import STOCK, Row, Summary
from vllm_tts_cache.files import publish

FORMAT_VERSION = 2
MAX_SAMPLES = 150  # of a row

_HEADINGS = (
    "scenario",
    "model",
    "what",
    "unit",
    "ours",
    "against",
    "ratio",
    "target",
    "met",
)
_NUM_LEFT = 4  # columns of text


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that one run says, and on what it was measured."""

    began: datetime
    revision: str
    is_dirty: bool
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    rows: Sequence[Row]

    @property
    def file_name(self) -> str:
        dirty = "-dirty" if self.is_dirty else ""
        return f"{self.began:%Y-%m-%d}-{self.revision}{dirty}.json"

    def plain(self) -> dict[str, Any]:
        """As JSON types; no name of a host or a directory is in it."""
        return {
            "format": FORMAT_VERSION,
            "began": self.began.isoformat(timespec="seconds"),
            "revision": self.revision,
            "dirty": self.is_dirty,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "settings": dict(self.settings),
            "rows": [_plain_row(row) for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class Begun:
    """A run that has begun, on what is there then."""

    at: datetime
    load: list[float]
    revision: str
    is_dirty: bool

    @classmethod
    def now(cls) -> "Begun":
        return cls(datetime.now(UTC), machine.load(), *machine.revision())

    def ended(self, settings: Mapping[str, Any], rows: Sequence[Row]) -> Run:
        loads = {"load_before": self.load, "load_after": machine.load()}
        return Run(
            began=self.at,
            revision=self.revision,
            is_dirty=self.is_dirty,
            machine=machine.describe() | loads,
            versions=machine.versions(),
            settings=settings,
            rows=rows,
        )


def save(run: Run, directory: Path) -> Path:
    """Write the run whole; another one of the same day and revision stays.

    Raises: StorageError.
    """
    path = directory / run.file_name
    if path.exists():
        path = path.with_stem(f"{path.stem}-{run.began:%H%M%S}")
    # A row a line: readable, and a diff of two runs shows what moved.
    plain = run.plain()
    rows = ",\n".join("  " + json.dumps(row) for row in plain.pop("rows"))
    head = json.dumps(plain, indent=1).removesuffix("\n}")
    publish(path, f'{head},\n "rows": [\n{rows}\n ]\n}}\n'.encode())
    return path


def _plain_row(row: Row) -> dict[str, Any]:
    return {
        "scenario": row.scenario,
        "model": row.model,
        "what": row.what,
        "unit": row.unit,
        "note": row.note,
        "ours": _plain_summary(row.ours),
        "versus": None if row.reference is None else row.versus,
        "reference": None if row.reference is None else _plain_summary(row.reference),
        "no_stock": row.no_stock,
        "ratio": None if row.ratio is None else _short(row.ratio),
        "target": None if row.target is None else str(row.target),
        "met": row.is_met,
        "point": row.point and dataclasses.asdict(row.point),
    }


def _plain_summary(summary: Summary) -> dict[str, Any]:
    return {
        "median": _short(summary.median),
        "iqr": _short(summary.iqr),
        "samples": [_short(value) for value in thinned(summary.samples)],
    }


def thinned(samples: Sequence[float]) -> Sequence[float]:
    """Return samples as they came, or of very many those at even ranks, in order.

    A run has to stay small enough to be committed; pictures show no more than these.
    """
    if len(samples) <= MAX_SAMPLES:
        return samples
    ordered, last = sorted(samples), len(samples) - 1
    ranks = (round(at * last / (MAX_SAMPLES - 1)) for at in range(MAX_SAMPLES))
    return [ordered[rank] for rank in ranks]


def _short(value: float) -> float:
    return float(f"{value:.4g}") if abs(value) < 10_000 else round(value)


def rich_table(rows: Sequence[Row]) -> Table:
    caption = "median (distance between quartiles); against: stock unless named"
    table = Table(box=box.SIMPLE_HEAD, caption=caption, pad_edge=False)
    for heading in _HEADINGS:
        justify = "left" if heading in _HEADINGS[:_NUM_LEFT] else "right"
        table.add_column(heading, justify=justify)
    last = None
    for row in rows:
        if last not in (None, row.scenario):
            table.add_section()
        table.add_row(*cells(row))
        last = row.scenario
    return table


def markdown(rows: Sequence[Row]) -> str:
    num_right = len(_HEADINGS) - _NUM_LEFT
    rule = ("---",) * _NUM_LEFT + ("---:",) * num_right
    lines = [_HEADINGS, rule, *map(cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cells(row: Row) -> tuple[str, ...]:
    met = {True: "yes", False: "NO", None: ""}[row.is_met]
    ratio = "" if row.ratio is None else number(row.ratio)
    target = "" if row.target is None else str(row.target)
    what = f"{row.what} ({row.note})" if row.note else row.what
    ours, reference = _summary(row.ours), _reference(row)
    head = (row.scenario, row.model, what, row.unit)
    return *head, ours, reference, ratio, target, met


def number(value: float) -> str:
    """Three digits that count, and no exponent."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def _reference(row: Row) -> str:
    if row.reference is None:
        return f"- ({row.no_stock})" if row.no_stock else ""
    shown = _summary(row.reference)
    return shown if row.versus == STOCK else f"{row.versus}: {shown}"


def _summary(summary: Summary) -> str:
    return f"{number(summary.median)} ({number(summary.iqr)})"
