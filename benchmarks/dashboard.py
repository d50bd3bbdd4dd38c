"""The shipped dashboard's panels, drawn from what a Prometheus saw of a benchmark."""

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.plots import new_figure, save
from benchmarks.prometheus import Prometheus

_DASHBOARD = Path(__file__).parents[1] / "docs" / "monitoring" / "dashboard.json"
_COLUMNS, _PANEL_INCHES = 3, (4.6, 2.3)
_MAX_LABEL_CHARS = 34
_LABEL = re.compile(r"{{\s*(\w+)\s*}}")


@contextmanager
def scraped(target: str, folder: Path, picture: Path) -> Iterator[None]:
    """Scrape a server while the block runs, and draw all panels at its end.

    Args:
        target: ``host:port`` of the server.
        folder: Prometheus's.
        picture: Which is written over.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.time()
    with Prometheus(folder, target) as prometheus:
        yield
        _draw(prometheus, began, time.time(), picture)


def filled_in(query: str) -> str:
    """A panel's query with Grafana's variables filled in."""
    return query.replace("$__rate_interval", "1m").replace("$instance", ".*")


def _draw(prometheus: Prometheus, began: float, ended: float, picture: Path) -> None:
    panels = [p for p in json.loads(_DASHBOARD.read_text())["panels"] if "targets" in p]
    num_rows = -(-len(panels) // _COLUMNS)
    width, height = _PANEL_INCHES
    figure = new_figure((_COLUMNS * width, num_rows * height))
    axes = figure.subplots(num_rows, _COLUMNS).flat
    for axis, panel in zip(axes, panels, strict=False):
        for target in panel["targets"]:
            query = filled_in(target["expr"])
            for series in prometheus.over_time(query, began, ended):
                _line(axis, series, target.get("legendFormat", ""), began)
        _finish(axis, panel)
    for axis in list(axes)[len(panels) :]:
        axis.set_visible(False)
    save(figure, picture)


def _line(axis: Any, series: dict[str, Any], legend: str, began: float) -> None:
    at = [(float(when) - began) / 60 for when, _ in series["values"]]
    values = [float(value) for _, value in series["values"]]
    axis.plot(at, values, linewidth=1, label=label_of(legend, series["metric"]) or None)


def label_of(legend: str, labels: Mapping[str, str]) -> str:
    """A panel's legend with a series' labels in it, as Grafana fills it in.

    A series without one of them, as a sum of nothing is, has nothing in its place.
    """
    filled = _LABEL.sub(lambda match: labels.get(match[1], ""), legend)
    # What stood around a label that is not there goes as well.
    return " ".join(filled.replace("()", "").split()).strip(" :,")[:_MAX_LABEL_CHARS]


def _finish(axis: Any, panel: dict[str, Any]) -> None:
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "")
    axis.set_title(f"{panel['title']} ({unit})", fontsize=8, loc="left")
    axis.tick_params(labelsize=6)
    axis.set_ylim(bottom=0)
    axis.grid(color="#e6e8eb")
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=5, loc="best", framealpha=0.6)
