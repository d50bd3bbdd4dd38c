"""The rows as one table, for a terminal and for Markdown."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from benchmarks.rows import STOCK, Row, Summary

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
        return ""
    shown = _summary(row.reference)
    return shown if row.versus == STOCK else f"{row.versus}: {shown}"


def _summary(summary: Summary) -> str:
    return f"{number(summary.median)} ({number(summary.iqr)})"
