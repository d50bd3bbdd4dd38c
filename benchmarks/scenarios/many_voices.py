"""A hundred thousand registered and encoded voices: start, look-up, memory, stats."""

import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import written_voices
from benchmarks.bench import Bench
from benchmarks.measure import (
    MIB,
    AtMost,
    Point,
    RatioAtMost,
    Row,
    Summary,
    in_fresh_process,
    percentile,
)
from benchmarks.sides import Side, at_once
from benchmarks.streams import Bystanders
from benchmarks.written_voices import speaker_name, write_stock, write_voices

NAME = "many_voices"
NUM_VOICES, QUICK_NUM_VOICES = 100_000, 5_000
STOCK_NUM_VOICES = (10, 100, 1_000)  # the last is its cap
STOCK_CAP = "its cap is 1,000 voices"
PAGE = written_voices.PAGE
NUM_REQUESTS = 40
SCRAPE_SECONDS = 1.0

StoredSpeaker = dict[str, Any]


def run(bench: Bench) -> list[Row]:
    num_voices = bench.size(NAME, full=NUM_VOICES, quick=QUICK_NUM_VOICES)
    directory = bench.work / "many-voices"
    shutil.rmtree(directory, ignore_errors=True)
    counts = sorted({0, *STOCK_NUM_VOICES, num_voices // 10, num_voices})
    for count in counts:
        bench.step(f"{NAME}: writing {count:,} voices, encoded")
        write_voices(directory / f"{count}", count)
    found = _starts(bench, directory, counts)
    rows = [
        *_rows_of_lines(found, counts[1:]),
        *_judged_rows(found, num_voices),
        *_stock_rows(bench, directory, found),
        *_served_rows(bench, directory, num_voices),
    ]
    shutil.rmtree(directory)
    return rows


def _starts(
    bench: Bench, directory: Path, counts: list[int]
) -> dict[int, list[StoredSpeaker]]:
    """Fresh processes for each number of voices, in turns, without a first round."""
    found: dict[int, list[StoredSpeaker]] = defaultdict(list)
    for number in range(bench.num_rounds + 1):
        bench.step(f"{NAME}: starts, round {number}")
        for count in counts if number % 2 else counts[::-1]:
            one = _start("ours", directory / f"{count}")
            found[count] += [one] if number else []
    return found


def _start(side: str, directory: Path) -> StoredSpeaker:
    return in_fresh_process(written_voices.__name__, side, directory)


def _rows_of_lines(
    found: dict[int, list[StoredSpeaker]], counts: list[int]
) -> list[Row]:
    """What is drawn over the number of voices."""
    rows = []
    for count in counts:
        starts = Summary.of([one["start_ms"] for one in found[count]])
        look_ups = Summary.of([one["look_up_p99_ms"] for one in found[count]])
        rows += [
            Row(
                f"start of the speaker side, {count:,} voices",
                "ms",
                starts,
                note="in a fresh process",
                point=Point("scale", "start, ours", count),
            ),
            Row(
                f"look-up of a voice, p99, {count:,} voices",
                "ms",
                look_ups,
                target=AtMost(1),
                point=Point("scale", "look-up p99, ours", count),
            ),
        ]
    return rows


def _judged_rows(found: dict[int, list[StoredSpeaker]], num_voices: int) -> list[Row]:
    """What so many voices add to none."""
    voices, without = f"{num_voices:,} voices", found[0]
    start_ms = Summary.of([one["start_ms"] for one in without]).median
    rss_bytes = Summary.of([one["rss_bytes"] for one in without]).median
    every = found[num_voices]
    return [
        _row(
            f"start, what {voices} add to none",
            "ms",
            [one["start_ms"] - start_ms for one in every],
            AtMost(100),
        ),
        _row(
            f"memory of the speaker side, what {voices} add to none",
            "MiB",
            [(one["rss_bytes"] - rss_bytes) / MIB for one in every],
            AtMost(20),
            note=f"after recovery, look-ups and {written_voices.NUM_PAGES} pages",
        ),
        _row(
            f"recovery behind the start, {voices}",
            "s",
            [one["recover_seconds"] for one in every],
            note="in a thread of its own",
        ),
        _row(
            f"a page of {PAGE} in process, {voices}",
            "ms",
            [one["page_ms"] for one in every],
            AtMost(10),
        ),
    ]


def _stock_rows(
    bench: Bench, directory: Path, found: dict[int, list[StoredSpeaker]]
) -> list[Row]:
    """As many voices as stock allows: it opens every one's file."""
    rows = []
    for count in STOCK_NUM_VOICES:
        bench.step(f"{NAME}: {count:,} voices on stock")
        write_stock(directory / f"stock-{count}", count)
        took = [
            _start("stock", directory / f"stock-{count}")["start_ms"]
            for _ in range(bench.num_rounds + 1)
        ]
        rows.append(
            Row(
                f"start of the speaker side, {count:,} voices, beside stock",
                "ms",
                Summary.of([one["start_ms"] for one in found[count]]),
                Summary.of(took[1:]),
                note="stock's cap" if count == STOCK_NUM_VOICES[-1] else "",
                point=Point("scale", "start, stock", count),
            )
        )
    return rows


def _served_rows(bench: Bench, directory: Path, num_voices: int) -> list[Row]:
    """The same through a server: one over all voices, one over none."""
    environ = {"SPEAKER_MAX_UPLOADED": "0"}
    bench.step(f"{NAME}: starting a server over {num_voices:,} voices, one over none")
    full, empty = (
        Side(f"{NAME}-{count}", bench.model, bench.work, environ, samples_dir=path)
        for count in (num_voices, 0)
        for path in [directory / f"{count}"]
    )
    streams = Bystanders(bench, "while speaker_cache is read every second")
    try:
        at_once((full, empty), lambda side: side.start())
        bench.step(f"{NAME}: listing")
        pages, look_ups = _list(full), _look_up(full, num_voices)
        _list(empty)
        rss = [side.api_rss_bytes() / MIB for side in (full, empty)]
        empty.stop()
        streams.register(full)
        reads = _scraped(bench, full, streams)
    finally:
        at_once((full, empty), lambda side: side.stop())
    voices = f"{num_voices:,} voices"
    return [
        _row(f"a page of {PAGE} over HTTP, {voices}", "ms", pages, AtMost(10)),
        _row(f"one voice over HTTP, {voices}", "ms", look_ups),
        _row(
            f"RSS of the API process, what {voices} add to none",
            "MiB",
            [rss[0] - rss[1]],
            AtMost(20),
            note="two servers, one sample each",
        ),
        _row(
            f"speaker_cache over HTTP beside streams, p99, {voices}",
            "ms",
            [percentile(reads, 99)],
        ),
        *streams.rows(target=RatioAtMost(1.1), no_stock=STOCK_CAP),
    ]


def _scraped(bench: Bench, side: Side, streams: Bystanders) -> list[float]:
    """Milliseconds of every time that the stats were read beside streams."""
    found: list[float] = []
    seconds = bench.pick(full=20.0, quick=5.0)
    for number in range(bench.num_rounds):
        bench.step(f"{NAME}: speaker_cache every second, round {number + 1}")
        with streams.beside(side, seconds), _scraping(side, found):
            time.sleep(seconds)
    return found


@contextmanager
def _scraping(side: Side, took_ms: list[float]) -> Iterator[None]:
    ended, errors = threading.Event(), []

    def scrape() -> None:
        while not ended.wait(SCRAPE_SECONDS):
            began = time.perf_counter()
            try:
                side.client.stats()
            except Exception as exc:  # noqa: BLE001  raised again in the scenario
                errors.append(exc)
                return
            took_ms.append(1e3 * (time.perf_counter() - began))

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


def _list(side: Side) -> list[float]:
    """Milliseconds of each page, walking through them, without the first."""
    found, after = [], ""
    for _ in range(NUM_REQUESTS + 1):
        began = time.perf_counter()
        answer = side.client.http.get(
            "/v1/audio/voices", params={"limit": PAGE, "after": after}
        )
        found.append(1e3 * (time.perf_counter() - began))
        after = answer.raise_for_status().json().get("next", "")
    return found[1:]


def _look_up(side: Side, num_voices: int) -> list[float]:
    found = []
    for number in range(0, num_voices, max(1, num_voices // NUM_REQUESTS)):
        began = time.perf_counter()
        side.client.http.get(
            f"/v1/audio/voices/{speaker_name(number)}"
        ).raise_for_status()
        found.append(1e3 * (time.perf_counter() - began))
    return found[1:]


def _row(
    what: str,
    unit: str,
    values: list[float],
    target: AtMost | None = None,
    note: str = "",
) -> Row:
    return Row(what, unit, Summary.of(values), target=target, note=note)
