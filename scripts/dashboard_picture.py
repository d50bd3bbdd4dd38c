"""Draw the dashboard's panels from a real Prometheus beside a server that runs.

    make serve PORT=8091
    .venv/bin/python -m scripts.dashboard_picture http://127.0.0.1:8091

The server gets voices, requests, faults and deletions for some minutes. Each panel's
own query is then asked over that time, and drawn at the panel's place. Grafana itself
is not run: its colours and menus are not shown. `make setup` and `make prometheus`
install what it takes.
"""

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import matplotlib as mpl
from rich.progress import track

mpl.use("Agg")
from matplotlib import pyplot

from benchmarks import plots
from benchmarks.bench import clip
from tests.prometheus import Prometheus
from vllm_tts_cache.testing.server import HOST, SpeechClient, data_url

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "docs" / "monitoring" / "dashboard.json"
OUT = ROOT / "docs" / "images" / "dashboard.png"
STEP_SECONDS, RATE = 2, "20s"
COLUMNS, WIDTH_INCHES, ROW_INCHES, DPI = 24, 15.0, 0.32, 72
UNITS = {
    "reqps": (1.0, "1/s"),
    "ops": (1.0, "1/s"),
    "bytes": (1e6, "MB"),
    "percentunit": (0.01, "%"),
    "s": (1.0, "s"),
}
TEXT = "The lantern by the harbour."


def _load(client: SpeechClient, ends: threading.Event) -> None:
    """Something of everything that a panel shows, again and again."""
    for number in itertools.count():
        if ends.is_set():
            return
        name, sample = f"voice-{number}", clip(2.0, number)
        client.register(name, sample, ref_text=TEXT, consent="bench")
        for spoken in (number, number // 2, number // 2):
            client.speak(TEXT, voice=f"voice-{spoken}")
        if number % 3 == 0:
            client.speak(
                TEXT, ref_audio=data_url(clip(2.0, 9_999 + number)), ref_text=TEXT
            )
        if number % 5 == 0:
            client.speak(TEXT, voice="nobody")
            client.speak(TEXT, ref_audio=f"http://{HOST}:1/clip.wav")
            client.register("refused", b"no audio")
        if number % 4 == 3:
            client.http.delete(f"/v1/audio/voices/voice-{number - 3}")


def _series(
    url: str, panel: Mapping[str, Any], start: float, end: float
) -> Iterator[tuple[str, list[float], list[float]]]:
    """The panel's lines: name, seconds since the start, values."""
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", RATE)
        asked: dict[str, str | float] = {
            "query": query.replace("$instance", ".*"),
            "start": start,
            "end": end,
            "step": STEP_SECONDS,
        }
        answer = httpx.get(f"{url}/api/v1/query_range", params=asked)
        for found in answer.raise_for_status().json()["data"]["result"]:
            name = target["legendFormat"]
            for label, value in found["metric"].items():
                name = name.replace("{{" + label + "}}", value)
            name = "none" if "{{" in name else name  # `or vector(0)` has no labels
            at, values = zip(*found["values"], strict=True)
            yield name, [each - start for each in at], list(map(float, values))


def _draw(url: str, start: float, end: float, out: Path) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    pyplot.rcParams.update({"font.size": 8, "axes.titlesize": 9, "lines.linewidth": 1})
    size = WIDTH_INCHES, height * ROW_INCHES
    figure = pyplot.figure(figsize=size, dpi=DPI)
    for panel in track(panels, "drawing"):
        place, title = panel["gridPos"], panel["title"]
        left, top = place["x"] / COLUMNS, 1 - place["y"] / height
        if panel["type"] == "row":
            figure.text(left + 0.005, top - 0.7 / height, title, weight="bold", size=11)
            continue
        width, tall = place["w"] / COLUMNS, place["h"] / height
        inner = (left + 0.035, top - tall * 0.86, width - 0.045, tall * 0.66)
        axes = figure.add_axes(inner)
        factor, unit = UNITS.get(panel["fieldConfig"]["defaults"].get("unit"), (1, ""))
        lines = list(_series(url, panel, start, end))
        axes.set_title(f"{title}, {unit}" if unit else title, loc="left")
        if panel["type"] == "stat":
            axes.axis("off")
            last = f"{lines[0][2][-1]:g}" if lines else "-"
            axes.text(0.5, 0.5, last, size=36, ha="center", va="center")
            continue
        for name, at, values in lines:
            axes.plot(at, [value / factor for value in values], label=name)
        axes.set_ylim(bottom=0)
        axes.set_xticks([])
        axes.spines[["top", "right"]].set_visible(False)
        if lines:
            axes.legend(fontsize=6, frameon=False, loc="upper left", ncols=2)
    plots.save(figure, out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the server, then draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("server", help="its URL")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    target = given.server.partition("://")[2].rstrip("/")
    client, ends = SpeechClient(given.server), threading.Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        Prometheus(Path(folder), target) as prometheus,
    ):
        loading = threading.Thread(target=_load, args=(client, ends))
        loading.start()
        start = time.time()
        for _ in track(range(round(given.minutes * 60)), "watching"):
            time.sleep(1)
        _draw(prometheus.url, start, time.time(), given.out)
        ends.set()
        loading.join()
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
