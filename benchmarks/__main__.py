"""``python -m benchmarks``: measure, print one table, write one JSON file."""

import argparse
import signal
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from benchmarks import machine, results, runner, table
from benchmarks.sides import CHUNK_FRAMES

ROUNDS, QUICK_ROUNDS = 5, 3
_TABLE_WIDTH = 190


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 whatever the figures are, because a target that is missed is a result."""
    given = _parser().parse_args(arguments)
    plan = _plan(given)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)  # unwinds, so that the servers are stopped
    plan.work.mkdir(parents=True, exist_ok=True)
    began = datetime.now(timezone.utc)
    load_before, (revision, is_dirty) = machine.load(), machine.revision()
    outcome = runner.run(plan)
    run = results.Run(
        began=began,
        revision=revision,
        is_dirty=is_dirty,
        machine={
            **machine.describe(),
            "load_before": load_before,
            "load_after": machine.load(),
        },
        versions=machine.versions(),
        settings={
            "quick": plan.is_quick,
            "rounds": plan.num_rounds,
            "scenarios": [scenario.name for scenario in plan.scenarios],
            "seconds": outcome.seconds,
            "codec_chunk_frames": CHUNK_FRAMES,
            "checkpoint": "random weights, reference encoders of the released sizes",
            "reference_encoders_dtype": "float32 on both sides",
            "threads_per_stage": 1,
        },
        rows=outcome.rows,
    )
    _show(run, results.save(run, given.out), as_markdown=given.markdown)
    return 0


def _show(run: results.Run, path: Path, *, as_markdown: bool) -> None:
    if as_markdown:
        sys.stdout.write(table.markdown(run.rows))
    else:
        is_terminal = sys.stdout.isatty()
        console = Console(width=None if is_terminal else _TABLE_WIDTH)
        console.print(table.rich_table(run.rows))
    judged = [row.is_met for row in run.rows if row.is_met is not None]
    print(f"{sum(judged)} of {len(judged)} targets met; {path}", file=sys.stderr)


def _plan(given: argparse.Namespace) -> runner.Plan:
    chosen = given.only or [scenario.name for scenario in runner.SCENARIOS]
    default_rounds = QUICK_ROUNDS if given.quick else ROUNDS
    return runner.Plan(
        scenarios=[s for s in runner.SCENARIOS if s.name in chosen],
        num_rounds=given.rounds or default_rounds,
        is_quick=given.quick,
        work=given.work.absolute(),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure vllm-tts-cache beside stock vLLM-Omni, in turns, on the "
        "CPU, with a tiny talker and reference encoders of the released sizes.",
    )
    names = [scenario.name for scenario in runner.SCENARIOS]
    here = Path(__file__).parent
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer requests")
    add("--only", action="append", choices=names, help="this scenario; may be repeated")
    add("--rounds", type=_positive, help=f"({ROUNDS}; {QUICK_ROUNDS} with --quick)")
    add("--markdown", action="store_true", help="print the table as Markdown")
    add("--out", type=Path, default=here / "results", help="where the JSON goes")
    add("--work", type=Path, default=here.parent / ".work" / "bench")
    return parser


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(f"must be at least 1: {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
