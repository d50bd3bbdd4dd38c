"""Two thousand voices of a manifest, by the command line, while streams run."""

import csv
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import lowest
from benchmarks.bench import Bench, clip
from benchmarks.measure import MIB, AtMost, RatioAtMost, Row, Summary
from benchmarks.sides import Side
from benchmarks.streams import Bystanders

NAME = "bulk_command"
NUM_VOICES, QUICK_NUM_VOICES = 2_000, 60
CLIP_SECONDS = 1.1
# The command is cut short when so much of the manifest is there, and run again.
CUT_SHARE = 0.4
# Memory is compared from here on: pools of threads and connections are filled by then.
SETTLED_SHARE = 0.2
LOOK_SECONDS = 1.0
INTERRUPTED = 130
_NO_STOCK = "has no such command"


@dataclass(slots=True)
class Watch:
    """Looks at a server once a second.

    Attributes:
        seen: Voices that are there, and resident MiB of all of its processes.
    """

    side: Side
    num_before: int
    seen: list[tuple[int, float]] = field(default_factory=list)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Until the block ends."""
        ended = threading.Event()
        thread = threading.Thread(target=self._look, args=(ended,))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    @property
    def num_voices(self) -> int:
        """Those that were added since the start."""
        return self.seen[-1][0] if self.seen else 0

    def growth_mib(self, num_voices: int) -> float:
        """From when a fifth was there to the end, at their highest."""
        settled = SETTLED_SHARE * num_voices
        early = [mib for count, mib in self.seen if settled / 2 <= count <= settled]
        return max(mib for _, mib in self.seen[-10:]) - max(early or [self.seen[0][1]])

    def _look(self, ended: threading.Event) -> None:
        while not ended.wait(LOOK_SECONDS):
            count = num_registered(self.side) - self.num_before
            self.seen.append((count, _rss_mib(self.side.pid)))


def run(bench: Bench) -> list[Row]:
    num_voices = bench.size(NAME, full=NUM_VOICES, quick=QUICK_NUM_VOICES)
    bench.step(f"{NAME}: writing a manifest of {num_voices:,} voices")
    folder = bench.work / "manifest"
    manifest = _write(bench, folder, num_voices)
    side = bench.sides.ours
    streams = Bystanders(bench, "while a manifest is registered")
    streams.register(side)
    watch = Watch(side, num_registered(side))
    bench.step(f"{NAME}: adding {num_voices:,} voices, interrupted once")
    quiet = bench.pick(full=60.0, quick=5.0)
    with streams.beside(side, quiet, quiet_after_seconds=quiet):
        began = time.perf_counter()
        with watch.looking():
            cut = _cut_short(side, manifest, watch, round(CUT_SHARE * num_voices))
            done = _finish(_begin(side, manifest, "--wait"), 0)
        took = time.perf_counter() - began
    shutil.rmtree(folder)
    _check(cut, done, num_voices)
    voices = f"{num_voices:,} voices by the command"
    rows = [
        _row(f"{voices}: all there and encoded", "s", took),
        _row(
            f"{voices}: there when it was interrupted",
            "voices",
            cut["counts"]["added"],
        ),
        _row(
            f"{voices}: memory of the server, from the first fifth on",
            "MiB",
            watch.growth_mib(num_voices),
            AtMost(64),
        ),
    ]
    bench.step(f"{NAME}: beside a program of the lowest priority")
    floor = streams.floor_rows(side, bench.pick(full=10.0, quick=3.0))
    gaps = streams.rows(target=RatioAtMost(1.5), no_stock=_NO_STOCK)
    return [*rows, *gaps, *floor]


def num_registered(side: Side) -> int:
    """Voices in the catalogue."""
    return side.client.stats()["registry"]["speakers"]


def _write(bench: Bench, folder: Path, num_voices: int) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    *_, fields = bench.model.modes.values()
    with (folder / "voices.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("name", "audio", "ref_text"))
        for index in range(num_voices):
            number = bench.number()
            (folder / f"{index}.wav").write_bytes(clip(CLIP_SECONDS, number))
            name = f"manifest-{number}"
            rows.writerow((name, f"{index}.wav", fields.get("ref_text", "")))
    return folder / "voices.csv"


def _begin(side: Side, manifest: Path, *options: str) -> "subprocess.Popen[str]":
    """Start the command as it comes, but for its priority.

    Its own work would be another machine's.
    """
    # Of a benchmark in the background it would be deaf to an interrupt.
    heard = ("env", "--default-signal=INT")
    command = (str(Path(sys.executable).with_name("vllm-tts-cache")), "voices", "add")
    given = ("--manifest", str(manifest), "--consent", "benchmark", "--json")
    given = (*given, "--url", str(side.client.http.base_url))
    return subprocess.Popen(
        lowest.command(*heard, *command, *given, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _cut_short(side: Side, manifest: Path, watch: Watch, at: int) -> dict[str, Any]:
    process = _begin(side, manifest)
    while watch.num_voices < at and process.poll() is None:
        time.sleep(LOOK_SECONDS / 4)
    process.send_signal(signal.SIGINT)
    return _finish(process, INTERRUPTED)


def _finish(process: "subprocess.Popen[str]", status: int) -> dict[str, Any]:
    """What it printed. Raises: RuntimeError if it ended otherwise."""
    out, _ = process.communicate()
    if process.returncode != status:
        raise RuntimeError(f"voices add: status {process.returncode}: {out[-500:]}")
    return json.loads(out)


def _check(cut: dict[str, Any], done: dict[str, Any], num_voices: int) -> None:
    """Raises: RuntimeError if the second run did not do just what the first left."""
    there = cut["counts"]["added"]
    expected = {"unchanged": there, "added": num_voices - there}
    if done["counts"] != expected:
        raise RuntimeError(f"expected {expected}, got {done['counts']}")


def _rss_mib(pid: int) -> float:
    server = psutil.Process(pid)
    every = (server, *server.children(recursive=True))
    return sum(process.memory_info().rss for process in every) / MIB


def _row(what: str, unit: str, figure: float, target: AtMost | None = None) -> Row:
    return Row(what, unit, Summary.of([figure]), target=target, no_stock=_NO_STOCK)
