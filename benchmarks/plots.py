"""Pictures of a run, each for one question: ``docs/plots/<name>.png``.

* ``clients``: how many requests a second are answered, and how late the first audio
  comes, over the number of clients.
* ``cost``: what a warm request costs the API process, over the length of its reference.
* ``gaps``: how long a listener waits between chunks, quiet and while others' cold
  references arrive.
* ``scale``: what a start and a look-up take, over the number of voices.

Drawn from the JSON of a run; the same file gives the same picture, byte for byte on one
machine. A picture whose rows a run does not have is left out.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_OURS, _STOCK, _GREY = "#1f6feb", "#c9772b", "#57606a"
_STYLES = ("o-", "o--", "o:", "s-", "s--", "s:")  # a model each
_INCHES, _DPI, _NUM_COLOURS = (8.0, 4.2), 110, 64

Rows = Sequence[Mapping[str, Any]]
Line = tuple[list[float], list[float]]


def draw(result: Path, directory: Path) -> list[Path]:
    """Draw what a result file has rows for; returns the pictures.

    Raises: ImportError without matplotlib; OSError, ValueError for a bad file.
    """
    by_picture: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in json.loads(result.read_text())["rows"]:
        if point := row.get("point"):
            by_picture[point["picture"]].append(row)
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, rows in sorted(by_picture.items()):
        figure = _new_figure()
        _PICTURES[name](figure, rows)
        drawn.append(directory / f"{name}.png")
        save(figure, drawn[-1])
    return drawn


def _draw_cost(figure: Any, rows: Rows) -> None:
    figure.suptitle("What a warm request costs the API process", **_TITLE)
    panels = (
        ("cpu_ms", 1, "CPU time before the engine is called, ms"),
        ("engine_bytes", 1e6, "message to the engine, MB"),
    )
    styles: dict[str, str] = {}
    for axis, (field, unit, title) in zip(figure.subplots(1, 2), panels, strict=True):
        lines = _lines(row for row in rows if _line(row).endswith(field))
        names = []
        for (side, line), (at, medians) in lines.items():
            values = [median / unit for median in medians]
            colour = _STOCK if side == "stock" else _OURS
            model = line.removesuffix(f" {field}")
            style = styles.setdefault(model, _STYLES[len(styles) % len(_STYLES)])
            axis.plot(at, values, style, color=colour, ms=4)
            names.append((values[-1], f"{side}, {model}", colour))
        axis.set_xlim(0, 48)
        axis.set_ylim(0, 1.1 * max(value for value, *_ in names))
        axis.set_xticks([3, 10, 30])
        axis.set_xlabel("seconds of reference audio", fontsize=8)
        _finish(axis, title)
        _name_apart(axis, 31, names)


def _draw_gaps(figure: Any, rows: Rows) -> None:
    """Shares rather than densities: the tail is what a listener hears."""
    figure.suptitle("How long a listener waits for the next chunk", **_TITLE)
    axis = figure.subplots()
    for row in rows:
        is_quiet = _line(row) == "quiet"
        for side, colour in (("ours", _OURS), ("reference", _STOCK)):
            if row[side] is None:
                continue
            gaps = np.sort(row[side]["samples"]) / 1e3
            # The share of gaps that are at least as long; the longest is 1 of all.
            shares = 100 * np.arange(len(gaps), 0, -1) / len(gaps)
            name = "ours" if side == "ours" else "stock"
            axis.step(
                gaps,
                shares,
                ":" if is_quiet else "-",
                color=colour,
                linewidth=1.4 if is_quiet else 2,
                where="post",
                label=f"{name}, {_line(row)}",
            )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_ylim(top=100)
    axis.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10])
    axis.set_xlabel("seconds between two chunks of a running stream", fontsize=8)
    axis.legend(fontsize=8, frameon=False, loc="upper right")
    _finish(axis, "% of gaps that are longer")


def _draw_clients(figure: Any, rows: Rows) -> None:
    figure.suptitle("What many clients at once get", **_TITLE)
    panels = (
        ("per_second", 1, "requests a second"),
        ("first_ms", 1e3, "p99 of the time to first audio, s"),
    )
    styles: dict[str, str] = {}
    axes = figure.subplots(1, 2)
    for axis, (field, unit, title) in zip(axes, panels, strict=True):
        lines = _lines(row for row in rows if _line(row).endswith(field))
        for (side, line), (at, medians) in lines.items():
            way = line.removesuffix(f" {field}")
            style = styles.setdefault(way, _STYLES[len(styles) % len(_STYLES)])
            axis.plot(
                at,
                [median / unit for median in medians],
                style,
                color=_STOCK if side == "stock" else _OURS,
                ms=4,
                label=f"{side}, {way}",
            )
        axis.set_xscale("log")
        if field == "per_second":
            axis.set_ylim(bottom=0)
        else:
            axis.set_yscale("log")
        axis.set_xticks(sorted({row["point"]["at"] for row in rows}))
        axis.set_xlabel("clients at once", fontsize=8)
        _finish(axis, title)
    axes[-1].legend(fontsize=8, frameon=False)


def _draw_scale(figure: Any, rows: Rows) -> None:
    figure.suptitle("What the number of registered voices costs", **_TITLE)
    axis = figure.subplots()
    drawn = _lines(rows)
    for (side, line), (at, values) in drawn.items():
        is_stock = line.endswith("stock")
        if is_stock != (side == "stock"):  # ours beside stock is a line of its own
            continue
        colour = _STOCK if is_stock else _OURS
        axis.plot(at, values, "o--" if "look-up" in line else "o-", color=colour, ms=4)
        _name(axis, at, values, line, colour)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("registered and encoded voices", fontsize=8)
    axis.margins(y=0.12)
    _finish(axis, "ms")


_TITLE = {"fontsize": 11, "fontweight": "bold", "x": 0.01, "ha": "left"}
_PICTURES: dict[str, Callable[[Any, Rows], None]] = {
    "clients": _draw_clients,
    "cost": _draw_cost,
    "gaps": _draw_gaps,
    "scale": _draw_scale,
}


def _line(row: Mapping[str, Any]) -> str:
    return row["point"]["line"]


def _lines(rows: Any) -> dict[tuple[str, str], Line]:
    """(ours or stock, line) -> where, and medians, from left to right."""
    found: dict[tuple[str, str], Line] = defaultdict(lambda: ([], []))
    for row in sorted(rows, key=lambda row: row["point"]["at"]):
        for side, summary in (("ours", row["ours"]), ("stock", row["reference"])):
            if summary is not None:
                at, values = found[side, _line(row)]
                at.append(row["point"]["at"])
                values.append(summary["median"])
    return found


def _name(
    axis: Any, at: list[float], values: list[float], text: str, colour: str
) -> None:
    """The line's name and its last value, at its right end: no legend to look up."""
    axis.annotate(
        f"{text}: {_shown(values[-1])}",
        (at[-1], values[-1]),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=colour,
    )


def _name_apart(axis: Any, at: float, names: list[tuple[float, str, str]]) -> None:
    """Names and values beside the lines' ends, moved up where they would overlap."""
    apart = 0.06 * axis.get_ylim()[1]
    lowest = apart / 3  # above the axis
    for value, text, colour in sorted(names):
        lowest = max(value, lowest)
        axis.text(at, lowest, f"{text}: {_shown(value)}", fontsize=8, color=colour)
        lowest += apart


def _shown(value: float) -> str:
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value >= 0.01 else f"{value:.4f}"


def _finish(axis: Any, title: str) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_title(title, fontsize=8, loc="left", color=_GREY)
    for ruler in (axis.xaxis, axis.yaxis):
        ruler.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.9g}"))
        ruler.set_minor_formatter(FuncFormatter(lambda *_: ""))
    axis.tick_params(labelsize=8, colors=_GREY)
    axis.grid(which="major", color="#e6e8eb")
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _new_figure() -> Any:
    """An empty figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(_INCHES, dpi=_DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Without time or version, so that a picture changes when figures do."""
    from PIL import Image

    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    # Flat colours: a palette loses little that is seen, and most of the bytes.
    picture.quantize(_NUM_COLOURS).save(path, optimize=True)
