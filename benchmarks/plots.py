"""One picture a scenario, drawn from the JSON of a run: ``docs/plots/<name>.png``.

The same file gives the same picture, byte for byte on one machine.
"""

import itertools
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import STOCK
from benchmarks.table import number

_COLOURS = {"ours": "#1f6feb", STOCK: "#c9772b", "other": "#8c959f"}
_TARGET_COLOUR = "#1a7f37"
_ROW_INCHES, _WIDTH_INCHES, _DPI = 0.36, 8.6, 110
_LABEL_WIDTH = 52
_NUM_COLOURS = 48

Rows = Sequence[Mapping[str, Any]]


def draw(result: Path, directory: Path) -> list[Path]:
    """Draw every scenario of a result file; returns the pictures.

    Raises: ImportError without matplotlib; OSError, ValueError for a bad file.
    """
    rows = json.loads(result.read_text())["rows"]
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, group in itertools.groupby(
        sorted(rows, key=lambda row: row["scenario"]), lambda row: row["scenario"]
    ):
        path = directory / f"{name}.png"
        _draw_scenario(name, list(group), path)
        drawn.append(path)
    return drawn


def _draw_scenario(name: str, rows: Rows, path: Path) -> None:
    """A panel a unit, since only what has one unit shares an axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _by_unit(rows)
    heights = [len(panel) + 1.6 for panel in panels.values()]
    figure = Figure(
        figsize=(_WIDTH_INCHES, _ROW_INCHES * sum(heights) + 0.5),
        dpi=_DPI,
        facecolor="white",
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axis, (unit, panel) in zip(axes[:, 0], panels.items(), strict=True):
        _draw_panel(axis, unit, panel)
    figure.suptitle(name, fontsize=11, fontweight="bold")
    _add_legend(figure, rows)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Without time or version, so that a picture changes when figures do."""
    from PIL import Image

    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    # Flat colours: a palette loses little that is seen, and most of the bytes.
    picture.quantize(_NUM_COLOURS).save(path, optimize=True)


def _draw_panel(axis: Any, unit: str, rows: Rows) -> None:
    for place, row in enumerate(rows):
        _bar(axis, place - 0.18, row["ours"], "ours")
        if row["reference"] is not None:
            _bar(axis, place + 0.18, row["reference"], _kind(row))
        if (target := _target(row)) is not None:
            axis.plot(
                [target, target],
                [place - 0.42, place + 0.42],
                color=_TARGET_COLOUR,
                linewidth=1.6,
                zorder=4,
            )
    axis.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=7)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    _scale(axis, rows)
    axis.set_xlabel(unit or "count", fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.grid(axis="x", color="#e6e8eb", zorder=0)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _bar(axis: Any, place: float, summary: Mapping[str, Any], kind: str) -> None:
    """The median, the quartiles as a line, the value as text."""
    median = summary["median"]
    low, high = np.percentile(summary["samples"], (25, 75))
    spread = [[max(0.0, median - low)], [max(0.0, high - median)]]
    axis.barh(
        place,
        max(median, 0.0),
        height=0.34,
        color=_COLOURS[kind],
        xerr=spread if high > low else None,
        error_kw={"elinewidth": 0.9, "ecolor": "#24292f"},
        zorder=3,
    )
    axis.annotate(
        number(median),
        (max(high, median, 0.0), place),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=6.5,
        zorder=5,
    )


def _scale(axis: Any, rows: Rows) -> None:
    """Logarithmic where figures are too far apart for one ruler."""
    summaries = [row["ours"] for row in rows]
    summaries += [row["reference"] for row in rows if row["reference"]]
    values = [s["median"] for s in summaries if s["median"] > 0]
    values += [t for row in rows if (t := _target(row))]
    if values and max(values) / min(values) > 30:
        axis.set_xscale("symlog", linthresh=min(values))
        axis.set_xlim(0, max(values) * 4)
    else:
        top = max([*values, *_tops(summaries)])
        axis.set_xlim(0, 1.15 * top or 1.0)  # all may be 0


def _tops(summaries: Iterable[Mapping[str, Any]]) -> list[float]:
    return [float(np.percentile(s["samples"], 75)) for s in summaries]


def _add_legend(figure: Any, rows: Rows) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {_kind(row) for row in rows if row["reference"]}
    handles: list[Any] = [Patch(color=_COLOURS["ours"], label="ours")]
    if STOCK in kinds:
        handles.append(Patch(color=_COLOURS[STOCK], label="stock vLLM-Omni"))
    if "other" in kinds:
        handles.append(Patch(color=_COLOURS["other"], label="what the row names"))
    if any(_target(row) is not None for row in rows):
        handles.append(Line2D([], [], color=_TARGET_COLOUR, label="target"))
    handles.append(Line2D([], [], color="#24292f", lw=0.9, label="quartiles"))
    figure.legend(
        handles=handles, loc="outside lower right", ncols=5, fontsize=7, frameon=False
    )


def _by_unit(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault(row["unit"], []).append(row)
    return panels


def _kind(row: Mapping[str, Any]) -> str:
    return STOCK if row["versus"] == STOCK else "other"


def _target(row: Mapping[str, Any]) -> float | None:
    """The target as a value of the axis: a ratio's is a share of the reference."""
    if not (text := row["target"]):
        return None
    value = float(text.removeprefix("<= ").removeprefix(">= ").removesuffix("x"))
    if not text.endswith("x"):
        return value
    return value * row["reference"]["median"] if row["reference"] else None


def _label(row: Mapping[str, Any]) -> str:
    what = f"{row['model']}: {row['what']}" if row.get("model") else row["what"]
    if row["reference"] is not None and row["versus"] != STOCK:
        what += f" (beside {row['versus']})"
    return textwrap.fill(what, _LABEL_WIDTH)
