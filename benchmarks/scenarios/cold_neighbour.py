"""New references arrive beside answers that come whole: how long these take.

`cold_bystander` for models whose answers have no chunks to hold up.
"""

import time
from collections import defaultdict

from benchmarks.bench import Bench
from benchmarks.measure import Row, Summary, percentile
from benchmarks.sides import Side
from benchmarks.streams import Background, make_warm, speak_cold

NAME = "cold_neighbour"
NUM_NEIGHBOURS = 2
QUIET, DISTURBED = "quiet", "while cold references arrive"

_SENTENCES = 4
_VOICES = [f"neighbour-{number}" for number in range(NUM_NEIGHBOURS)]

Samples = dict[tuple[str, str], list[float]]
Interval = tuple[float, float]


class Neighbours(Background):
    """Requests for known voices, one after another on each thread."""

    def __init__(self, bench: Bench, side: Side):
        super().__init__(
            [lambda voice=voice: self._speak(voice) for voice in _VOICES],
        )
        self._bench, self._side = bench, side
        self._answers: list[Interval] = []

    def answers_ms(self, began: float, ended: float) -> list[float]:
        """How long those took that came in the interval, once it is over."""
        return [1e3 * (b - a) for a, b in self._answers if began < b <= ended]

    def _speak(self, voice: str) -> None:
        began = time.perf_counter()
        self._side.speak(self._bench.text(_SENTENCES), voice=voice)
        self._answers.append((began, time.perf_counter()))


def run(bench: Bench) -> list[Row]:
    bench.step(f"{NAME}: warming up")
    bench.sides.both(lambda side: make_warm(bench, side, _VOICES))
    for side in bench.sides:
        speak_cold(bench, side)  # a server's first encode is slower
    every: Samples = defaultdict(list)
    p99: Samples = defaultdict(list)
    cold: Samples = defaultdict(list)
    for number, side in bench.sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: round {number + 1}, {side.name}")
        cold[side.name, "alone"].append(speak_cold(bench, side))
        for state, taken in _beside(bench, side, cold[side.name, "beside"]).items():
            if not taken:
                raise RuntimeError(f"{side.name}: no answer came whole, {state}")
            every[side.name, state] += taken
            p99[side.name, state].append(percentile(taken, 99))
    return [*_neighbour_rows(every, p99), *_newcomer_rows(cold)]


def _beside(bench: Bench, side: Side, cold: list[float]) -> dict[str, list[float]]:
    """How long the neighbours' answers took, in ms; the newcomers' go to ``cold``."""
    with Neighbours(bench, side) as neighbours:
        began = time.perf_counter()
        time.sleep(bench.pick(full=10.0, quick=4.0))
        disturbed = time.perf_counter()
        for _ in range(bench.pick(full=4, quick=2)):
            cold.append(speak_cold(bench, side))
    # With those that came after the last newcomer's: they may have waited the longest.
    return {
        QUIET: neighbours.answers_ms(began, disturbed),
        DISTURBED: neighbours.answers_ms(disturbed, float("inf")),
    }


def _neighbour_rows(every: Samples, p99: Samples) -> list[Row]:
    rows = [
        Row(
            f"a neighbour's answer, {state}, {what}",
            "ms",
            Summary.of(samples["ours", state]),
            Summary.of(samples["stock", state]),
        )
        for state in (QUIET, DISTURBED)
        for what, samples in (("every one", every), ("p99", p99))
    ]
    against = Row(
        f"p99 of a neighbour's answer, {DISTURBED}, against quiet",
        "ms",
        Summary.of(p99["ours", DISTURBED]),
        Summary.of(p99["ours", QUIET]),
        versus="ours, quiet",
        note="it waits for the newcomers' answers too",
    )
    return [*rows, against]


def _newcomer_rows(cold: Samples) -> list[Row]:
    wheres = (("alone", "alone"), ("beside", f"beside {NUM_NEIGHBOURS} neighbours"))
    return [
        Row(
            f"the cold request, {told}",
            "s",
            Summary.of(cold["ours", where]),
            Summary.of(cold["stock", where]),
        )
        for where, told in wheres
    ]
