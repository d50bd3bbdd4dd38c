"""New references arrive while streams run: how long the streams are held up."""

import time
from collections import defaultdict

from benchmarks import machine
from benchmarks.bench import Bench
from benchmarks.measure import OURS, STOCK, RatioAtMost, Row, Summary
from benchmarks.streams import NUM_STREAMS, Bystanders, quiet_seconds, speak_cold

NAME = "cold_bystander"
BETWEEN_SECONDS = 0.3

Samples = dict[tuple[str, str], list[float]]


def run(bench: Bench) -> list[Row]:
    bench.step(f"{NAME}: warming up")
    streams = Bystanders(bench, "while cold references arrive")
    bench.sides.both(streams.register)
    for side in bench.sides:
        speak_cold(bench, side)  # a server's first encode is slower
    samples: Samples = defaultdict(list)
    for number, side in bench.sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: round {number + 1}, {side.name}")
        spent = machine.cpu_seconds(side.pid)
        samples[side.name, "alone"].append(speak_cold(bench, side))
        spent = machine.cpu_seconds(side.pid) - spent
        samples[side.name, "spent"].append(spent)
        with streams.beside(side, quiet_seconds(bench)):
            for _ in range(bench.pick(full=2, quick=1)):
                samples[side.name, "beside"].append(speak_cold(bench, side))
                time.sleep(BETWEEN_SECONDS)
    bench.step(f"{NAME}: beside a program of the lowest priority")
    floor = streams.floor_rows(bench.sides.ours, bench.pick(full=10.0, quick=3.0))
    gaps = streams.rows(target=RatioAtMost(1.4), picture="gaps")
    return [
        *gaps,
        *floor,
        *_newcomer_rows(bench, samples),
        *_limit_rows(samples, streams),
    ]


def _newcomer_rows(bench: Bench, samples: Samples) -> list[Row]:
    def of(side: str, where: str) -> Summary:
        return Summary.of(samples[side, where])

    return [
        Row(
            "the cold request, alone",
            "s",
            of("ours", "alone"),
            of("stock", "alone"),
            target=RatioAtMost(1.1),
            note="" if bench.model.stock.note else "both in float32",
        ),
        Row(
            f"the cold request, beside {NUM_STREAMS} streams",
            "s",
            of("ours", "beside"),
            of("stock", "beside"),
        ),
        Row(
            f"the cold request, beside {NUM_STREAMS} streams, against alone",
            "s",
            of("ours", "beside"),
            of("ours", "alone"),
            versus="ours, alone",
            target=RatioAtMost(1.8),
        ),
    ]


def _limit_rows(samples: Samples, streams: Bystanders) -> list[Row]:
    """What the machine allows: the request's work, done by what the streams leave."""
    spent, idle = samples["ours", "spent"], streams.idle_cores(OURS)
    pairs = zip(spent, samples["ours", "alone"], idle, strict=True)
    # No sooner than alone, on a machine that has cores to spare.
    fastest = [max(work / max(cores, 0.01), alone) for work, alone, cores in pairs]
    return [
        Row(
            "CPU time of the cold request, alone",
            "s",
            Summary.of(spent),
            Summary.of(samples["stock", "spent"]),
        ),
        Row(
            f"cores that {NUM_STREAMS} quiet streams leave idle",
            "cores",
            Summary.of(idle),
            Summary.of(streams.idle_cores(STOCK)),
        ),
        Row(
            f"the cold request, beside {NUM_STREAMS} streams, against its limit",
            "s",
            Summary.of(samples["ours", "beside"]),
            Summary.of(fastest),
            versus="ours, its CPU time over the idle cores",
        ),
    ]
