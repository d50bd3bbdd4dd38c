"""A hundred thousand registered voices: starting, listing, memory."""

import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import fresh_process, start_process
from benchmarks.bench import Bench
from benchmarks.many_voices import speaker_name, write_ours, write_stock
from benchmarks.rows import AtMost, Row, Summary
from benchmarks.sides import Side, at_once

NAME = "registry_scale"
NUM_VOICES = 100_000
NUM_STOCK_VOICES = 1_000  # its cap
VOICES = f"{NUM_VOICES:,} voices"
MIB = 1024**2
PAGE = start_process.PAGE
NUM_LISTS = 40

Samples = dict[str, list[float]]


def run(bench: Bench) -> list[Row]:
    directory = bench.work / "registry-scale"
    shutil.rmtree(directory, ignore_errors=True)
    many, none = directory / "many", directory / "none"
    bench.step(f"{NAME}: writing {NUM_VOICES:,} voices")
    write_ours(many, NUM_VOICES)
    write_ours(none, 0)
    rows = [*_start_rows(bench, many, none), *_stock_rows(bench, directory)]
    rows += _served_rows(bench, many, none)
    shutil.rmtree(directory)
    return rows


def _start_rows(bench: Bench, many: Path, none: Path) -> list[Row]:
    starts: Samples = defaultdict(list)
    # Once more than measured: the first one reads the programs from the disk.
    for number in range(bench.num_rounds + 1):
        bench.step(f"{NAME}: starts, round {number}")
        for directory in (many, none) if number % 2 else (none, many):
            found = _start("ours", directory)
            starts[directory.name] += found["start_ms"] if number else []
    bench.step(f"{NAME}: recovery, memory")
    followed = {path.name: _start("ours", path, "--follow") for path in (many, none)}
    without = Summary.of(starts["none"])
    rss = [followed[name]["rss_bytes"] / MIB for name in ("many", "none")]
    return [
        Row(
            scenario=NAME,
            what=f"start of the speaker side, {VOICES}",
            unit="ms",
            ours=Summary.of(starts["many"]),
            reference=without,
            versus="ours, none",
            note="in a fresh process",
        ),
        Row(
            scenario=NAME,
            what=f"start, what {VOICES} add to none",
            unit="ms",
            ours=Summary.of([took - without.median for took in starts["many"]]),
            target=AtMost(100),
        ),
        Row(
            scenario=NAME,
            what=f"recovery behind the start, {VOICES}",
            unit="s",
            ours=Summary.of([followed["many"]["recover_seconds"]]),
            note="a thread that goes through the names of all files, once",
        ),
        Row(
            scenario=NAME,
            what=f"memory of the speaker side, what {VOICES} add to none",
            unit="MiB",
            ours=Summary.of([rss[0] - rss[1]]),
            target=AtMost(20),
            note=f"after recovery and {start_process.NUM_PAGES} pages",
        ),
        Row(
            scenario=NAME,
            what=f"a page of {PAGE} in process, {VOICES}",
            unit="ms",
            ours=Summary.of([followed["many"]["page_ms"]]),
            target=AtMost(10),
        ),
    ]


def _stock_rows(bench: Bench, directory: Path) -> list[Row]:
    """As many voices as stock allows: it opens every one's file."""
    bench.step(f"{NAME}: as many voices as stock allows")
    write_ours(directory / "ours", NUM_STOCK_VOICES)
    write_stock(directory / "stock", NUM_STOCK_VOICES)
    took = {
        side: _start(
            side, directory / side, "--follow", "--starts", bench.num_rounds + 1
        )
        for side in ("ours", "stock")
    }
    return [
        Row(
            scenario=NAME,
            what=f"start of the speaker side, {NUM_STOCK_VOICES:,} voices",
            unit="ms",
            ours=Summary.of(took["ours"]["start_ms"][1:]),
            reference=Summary.of(took["stock"]["start_ms"][1:]),
            note="stock's cap; again and again in one process",
        )
    ]


def _start(side: str, directory: Path, *options: object) -> dict[str, Any]:
    return fresh_process.run(start_process.__name__, side, directory, *options)


def _served_rows(bench: Bench, many: Path, none: Path) -> list[Row]:
    """The same through a server: one over all voices, one over none."""
    environ = {"SPEAKER_MAX_UPLOADED": "0"}
    bench.step(f"{NAME}: starting a server over {NUM_VOICES:,} voices, one over none")
    full, empty = (
        Side(f"{NAME}-{path.name}", bench.model, bench.work, environ, samples_dir=path)
        for path in (many, none)
    )
    try:
        at_once((full, empty), lambda side: side.start())
        bench.step(f"{NAME}: listing")
        pages, lookups = _list(full), _look_up(full)
        _list(empty)
        rss = [side.api_rss_bytes() / MIB for side in (full, empty)]
    finally:
        at_once((full, empty), lambda side: side.stop())
    return [
        Row(
            scenario=NAME,
            what=f"a page of {PAGE} over HTTP, {VOICES}",
            unit="ms",
            ours=Summary.of(pages),
            target=AtMost(10),
        ),
        Row(
            scenario=NAME,
            what=f"one voice over HTTP, {VOICES}",
            unit="ms",
            ours=Summary.of(lookups),
        ),
        Row(
            scenario=NAME,
            what=f"RSS of the API process, {VOICES}",
            unit="MiB",
            ours=Summary.of([rss[0]]),
            reference=Summary.of([rss[1]]),
            versus="ours, none",
        ),
        Row(
            scenario=NAME,
            what=f"RSS of the API process, what {VOICES} add to none",
            unit="MiB",
            ours=Summary.of([rss[0] - rss[1]]),
            target=AtMost(20),
            note="two servers, one sample each",
        ),
    ]


def _list(side: Side) -> list[float]:
    """Milliseconds of each page, walking through them; the first dropped."""
    found, after = [], ""
    for _ in range(NUM_LISTS + 1):
        began = time.perf_counter()
        answer = side.client.http.get(
            "/v1/audio/voices", params={"limit": PAGE, "after": after}
        )
        found.append(1e3 * (time.perf_counter() - began))
        after = answer.raise_for_status().json().get("next", "")
    return found[1:]


def _look_up(side: Side) -> list[float]:
    found = []
    for number in range(0, NUM_VOICES, NUM_VOICES // NUM_LISTS):
        began = time.perf_counter()
        side.client.http.get(
            f"/v1/audio/voices/{speaker_name(number)}"
        ).raise_for_status()
        found.append(1e3 * (time.perf_counter() - began))
    return found[1:]
