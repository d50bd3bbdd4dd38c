"""A day of churn, compressed: voices come, speak and go, on a small budget."""

import shutil

from benchmarks import fresh_process
from benchmarks.bench import Bench
from benchmarks.measure import MIB, AtMost, Row, Summary, in_fresh_process

NAME = "churn"
MEMORY_MIB = 64
NUM_OPERATIONS, QUICK_NUM_OPERATIONS = 20_000, 1_000

# RSS counts more than arrays: keys, freed pages that the allocator keeps, SQLite.
RSS_GROWTH_MAX_MIB = MEMORY_MIB + 32
# SQLite opens a connection when a thread first needs one, which may be late.
DESCRIPTORS_MAX = 3 * fresh_process.NUM_AT_ONCE


def run(bench: Bench) -> list[Row]:
    """In a process of its own, whose memory nothing else has touched."""
    num_operations = bench.pick(full=NUM_OPERATIONS, quick=QUICK_NUM_OPERATIONS)
    bench.step(f"{NAME}: {num_operations:,} operations")
    directory = bench.work / "churn"
    shutil.rmtree(directory, ignore_errors=True)
    budget = MEMORY_MIB * MIB
    process = (fresh_process.__name__, "churn", directory, num_operations, budget)
    found = in_fresh_process(*process)
    shutil.rmtree(directory)
    return [
        _row("operations a second", "1/s", found["operations_per_second"]),
        _row(
            f"largest sum of arrays in memory, budget {MEMORY_MIB} MiB",
            "MiB",
            found["largest_memory_bytes"] / MIB,
            AtMost(MEMORY_MIB),
            note=f"{found['evictions']:,} evictions",
        ),
        _row(
            "growth of RSS",
            "MiB",
            found["rss_growth_bytes"] / MIB,
            AtMost(RSS_GROWTH_MAX_MIB),
        ),
        _row(
            "growth of RSS in the second half",
            "MiB",
            found["rss_growth_second_half_bytes"] / MIB,
        ),
        *(
            _row(
                f"left over: {what}",
                "",
                max(0, count),
                AtMost(DESCRIPTORS_MAX if what == "descriptors" else 0),
            )
            for what, count in found["left"].items()
        ),
    ]


def _row(
    what: str, unit: str, value: float, target: AtMost | None = None, note: str = ""
) -> Row:
    return Row(what, unit, Summary.of([value]), target=target, note=note)
