"""Many clients at once: requests a second, and how long the first audio takes."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.bench import Bench, clip
from benchmarks.measure import STOCK, Point, Row, Summary, percentile
from benchmarks.scenarios.ttfa import ttfa_ms
from benchmarks.sides import Side

NAME = "saturation"
NUM_CLIENTS, QUICK_NUM_CLIENTS = (1, 4, 16, 64), (1, 4)
NUM_VOICES = (1, 10, 100)
# As much of a reference as a decoder that begins with it ever sees.
CLIP_SECONDS = 6
MIN_REQUESTS = 8

# By side, clients and voices.
Cells = dict[tuple[str, int, int], "Load"]


@dataclass(frozen=True, slots=True)
class Load:
    """What a number of clients got.

    Attributes:
        per_second: Requests that were answered to their end.
        first_ms: Time to first audio of each.
    """

    per_second: float
    first_ms: list[float]


def run(bench: Bench) -> list[Row]:
    """Each number of clients on each number of voices, once: it takes long.

    Of one number of voices alone where a size is asked for.
    """
    size = bench.size(NAME, full=0, quick=NUM_VOICES[0])
    numbers = [size] if size else list(NUM_VOICES)
    at_once = bench.pick(full=NUM_CLIENTS, quick=QUICK_NUM_CLIENTS)
    for side in bench.sides:
        bench.step(f"{NAME}: warming {numbers[-1]} voices, {side.name}")
        _warm_up(bench, side, numbers[-1], at_once[-1])
    cells: Cells = {}
    turn = 0
    for num_voices in numbers:
        for num_clients in at_once:
            order = list(bench.sides)[:: 1 if turn % 2 == 0 else -1]
            turn += 1
            for side in order:
                told = f"{num_clients} clients, {num_voices} voices, {side.name}"
                bench.step(f"{NAME}: {told}")
                load = _load(bench, side, num_clients, num_voices)
                cells[side.name, num_clients, num_voices] = load
    return [row for clients in at_once for row in _rows(cells, clients, numbers)]


def _warm_up(bench: Bench, side: Side, num_voices: int, num_clients: int) -> None:
    fields = bench.model.modes[bench.fullest_mode]
    for number in range(num_voices):
        sample = clip(CLIP_SECONDS, bench.number())
        side.register(_voice(number), sample, **fields)
        side.precompute(_voice(number))
    # Stock encodes a voice when it first speaks; no more speak than are asked for.
    num_speaking = min(num_voices, max(num_clients, MIN_REQUESTS))
    with ThreadPoolExecutor(NUM_CLIENTS[1]) as pool:
        list(pool.map(lambda n: _speak(bench, side, n), range(num_speaking)))


def _load(bench: Bench, side: Side, num_clients: int, num_voices: int) -> Load:
    """Clients who ask again as soon as they were answered, each at least once."""
    num_requests = max(num_clients, MIN_REQUESTS)
    voices = [number % num_voices for number in range(num_requests)]
    with ThreadPoolExecutor(num_clients) as pool:
        began = time.perf_counter()
        first = list(pool.map(lambda n: _speak(bench, side, n), voices))
        took = time.perf_counter() - began
    return Load(num_requests / took, first)


def _speak(bench: Bench, side: Side, number: int) -> float:
    return ttfa_ms(side, bench.short_text(), _voice(number))


def _rows(cells: Cells, num_clients: int, numbers: list[int]) -> list[Row]:
    rows = []
    for num_voices in numbers:
        ours = cells["ours", num_clients, num_voices]
        stock = cells[STOCK, num_clients, num_voices]
        line = f"{num_voices} voices" if num_voices > 1 else "one voice"
        of = f"{num_clients} at once, {line}"
        rows += [
            Row(
                f"requests a second, {of}",
                "1/s",
                Summary.of([ours.per_second]),
                Summary.of([stock.per_second]),
                point=Point(NAME, f"{line} per_second", num_clients),
            ),
            Row(
                f"p99 of the time to first audio, {of}",
                "ms",
                Summary.of([percentile(ours.first_ms, 99)]),
                Summary.of([percentile(stock.first_ms, 99)]),
                point=Point(NAME, f"{line} first_ms", num_clients),
            ),
        ]
    return rows


def _voice(number: int) -> str:
    return f"saturation-{number}"
