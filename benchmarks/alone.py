"""Benchmarks that need no server: their common options, and how one is run."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.measure import Row

_RESULTS = Path(__file__).parent / "results"


def parser(about: str | None, *, num_rounds: int) -> argparse.ArgumentParser:
    """What each of them can be told."""
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, default=num_rounds)
    made.add_argument("--bfloat16", action="store_true")
    made.add_argument("--small", action="store_true")
    made.add_argument("--out", type=Path, default=_RESULTS)
    return made


def dtype_of(given: argparse.Namespace) -> torch.dtype:
    return torch.bfloat16 if given.bfloat16 else torch.float32


def run(
    given: argparse.Namespace,
    measure: Callable[[argparse.Namespace], list[Row]],
    *,
    num_threads: int,
    **settings: Any,
) -> None:
    """Measure with so many threads, print a table and write it.

    Args:
        given: The options.
        measure: Gives the rows.
        num_threads: Of torch, while it measures.
        settings: Written with the results, beside the common ones.
    """
    begun = report.Begun.now()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        rows = measure(given)
    finally:
        torch.set_num_threads(before)
    sys.stdout.write(report.markdown(rows))
    common = {
        "rounds": given.rounds,
        "threads": num_threads,
        "dtype": "bfloat16" if given.bfloat16 else "float32",
        "decoder": "small" if given.small else "released size, random weights",
    }
    found = begun.ended(common | settings, rows)
    print(report.save(found, given.out), file=sys.stderr)
