"""Whether a clone in context keeps up with an x-vector under load, on one server."""

from benchmarks.bench import Bench
from benchmarks.harness import IN_CONTEXT, X_VECTOR
from benchmarks.measure import Row
from benchmarks.scenarios.field import QUICK_CLIENTS, ask

NAME = "parity"
NUM_CLIENTS = (1, 16, 64)


def run(bench: Bench) -> list[Row]:
    """Both ways on ours; stock has no such x-vector."""
    some = bench.pick(full=NUM_CLIENTS, quick=QUICK_CLIENTS)
    most = bench.size(NAME, full=max(NUM_CLIENTS), quick=max(QUICK_CLIENTS))
    clients = [each for each in some if each <= most]
    return ask(bench, NAME, [bench.sides.ours], clients, (IN_CONTEXT, X_VECTOR))
