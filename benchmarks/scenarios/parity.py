"""Whether a clone in context keeps up with an x-vector under load, on one server."""

from pathlib import Path
from tempfile import mkdtemp

from benchmarks.bench import Bench
from benchmarks.harness import IN_CONTEXT, X_VECTOR, Clips, rows
from benchmarks.measure import OURS, Row
from benchmarks.scenarios.field import MIN_REQUESTS, target_of

NAME = "parity"
NUM_CLIENTS, QUICK_CLIENTS = (1, 16, 64), (1, 4)


def run(bench: Bench) -> list[Row]:
    """Each number of clients, by the host's own harness; stock has no such x-vector."""
    bench.step(f"{NAME}: the voice")
    ours = target_of(bench.sides.ours, bench)
    ours.register()
    given = Clips(Path(mkdtemp(prefix=NAME, dir=bench.work)))
    made: list[Row] = []
    for each in bench.pick(full=NUM_CLIENTS, quick=QUICK_CLIENTS):
        bench.step(f"{NAME}: {each} clients")
        made += rows(
            {OURS: ours},
            clips=given,
            num_clients=each,
            num_requests=max(MIN_REQUESTS, each),
            num_rounds=bench.num_rounds,
            ways=(IN_CONTEXT, X_VECTOR),
        )
    return made
