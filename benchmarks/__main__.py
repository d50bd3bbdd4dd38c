"""``python -m benchmarks``: measure, print one table, write one JSON file, draw it."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from benchmarks import plots, report, run
from benchmarks.models import Model, default_models, model_called, models
from benchmarks.run import SCENARIOS, Plan, Scenario
from benchmarks.sides import CHUNK_FRAMES

ROUNDS, QUICK_ROUNDS = 5, 1
_ROOT = Path(__file__).parents[1]
_TABLE_WIDTH = 200

_QUICK = """\
--quick is meant to take 5 minutes on two slow cores, the checkpoint not counted. It
leaves out, unless --only or --model names it: every model but the first; many_voices,
start_stop, inline_flood, bulk_registration, bulk_command, field, parity, kv_prefix,
cold_neighbour. It leaves out: clones in context (but in cold_bystander); references of
10 s; several streams at once; 8 clips at once; restart and eviction. Its clips are
shorter, its numbers smaller, its round is one. Its figures show that it works, and
large differences; they are not for publication.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 whatever the figures are, because a target that is missed is a result.

    1 if a scenario could not be measured.
    """
    given = _parser().parse_args(arguments)
    if given.plots is not None:
        return _draw(given.plots, given.plots_out)
    plan = _plan(given)
    print(f"{plan.num_rounds} rounds, {_estimate(plan)}", file=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)  # unwinds, so that the servers are stopped
    plan.work.mkdir(parents=True, exist_ok=True)
    begun = report.Begun.now()
    outcome = run.run(plan)
    found = begun.ended(
        {
            "quick": plan.is_quick,
            "rounds": plan.num_rounds,
            "scenarios": [scenario.name for scenario in plan.scenarios],
            "sizes": dict(plan.sizes),
            "seconds": outcome.seconds,
            "failed": outcome.failures,
            "codec_chunk_frames": CHUNK_FRAMES,
            "models": [model.name for model in plan.models],
            "checkpoints": "random weights",
            "reference_encoders": {m.name: m.encoder_sizes for m in plan.models},
            "reference_encoders_dtype": "float32 on both sides",
            "stock_changes": {m.name: m.stock.note for m in plan.models},
            "speaking_stage_changes": {m.name: dict(m.stage_0) for m in plan.models},
            "decoding_stage_changes": {m.name: dict(m.stage_1) for m in plan.models},
            "threads_per_stage": 1,
        },
        outcome.rows,
    )
    path = report.save(found, given.out)
    _show(found, path, as_markdown=given.markdown)
    for failure in outcome.failures:
        print(f"not measured: {failure}", file=sys.stderr)
    if _is_whole(plan) and not outcome.failures:
        _draw(path, given.plots_out)
    return 1 if outcome.failures else 0


def _estimate(plan: Plan) -> str:
    minutes = max(1, round(plan.seconds / 60))
    return f"about {minutes} min on two slow cores that nobody else uses"


def _is_whole(plan: Plan) -> bool:
    """Whether the pictures of the documentation may come from it."""
    asked = (len(plan.scenarios), len(plan.models), len(plan.sizes))
    return not plan.is_quick and asked == (len(SCENARIOS), len(default_models()), 0)


def _draw(result: Path, directory: Path) -> int:
    for path in plots.draw(result, directory):
        print(path, file=sys.stderr)
    return 0


def _show(found: report.Run, path: Path, *, as_markdown: bool) -> None:
    if as_markdown:
        sys.stdout.write(report.markdown(found.rows))
    else:
        is_terminal = sys.stdout.isatty()
        console = Console(width=None if is_terminal else _TABLE_WIDTH)
        console.print(report.rich_table(found.rows))
    judged = [row.is_met for row in found.rows if row.is_met is not None]
    print(f"{sum(judged)} of {len(judged)} targets met; {path}", file=sys.stderr)


def _plan(given: argparse.Namespace) -> Plan:
    default_rounds = QUICK_ROUNDS if given.quick else ROUNDS
    scenarios = [
        scenario
        for scenario in SCENARIOS
        if (
            scenario.name in given.only
            if given.only
            else scenario.is_in_quick or not given.quick
        )
    ]
    return Plan(
        scenarios=scenarios,
        models=[model_called(name) for name in dict.fromkeys(given.model)]
        if given.model
        else _models(scenarios, is_quick=given.quick),
        num_rounds=given.rounds or default_rounds,
        is_quick=given.quick,
        work=given.work.absolute(),
        sizes=dict(given.size or ()),
    )


def _models(scenarios: Sequence[Scenario], *, is_quick: bool) -> list[Model]:
    """All; of a quick run as few as have all of its scenarios."""
    if not is_quick:
        return default_models()
    needed = {s.name for s in scenarios if s.is_served}
    chosen: list[Model] = []
    for model in default_models():
        if needed & model.scenarios:
            chosen.append(model)
            needed -= model.scenarios
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure vllm-tts-cache beside stock vLLM-Omni, in turns, on the "
        "CPU, with tiny talkers. What the reference encoders are (of their released "
        "sizes, or small) is written with the results. All of it takes many "
        "hours on two slow cores; an estimate comes first.",
        epilog=_QUICK,
    )
    scenarios = [scenario.name for scenario in SCENARIOS]
    names = [model.name for model in models()]
    add = parser.add_argument
    add("--quick", action="store_true", help="much less; see below")
    add(
        "--only",
        action="append",
        choices=scenarios,
        help="this scenario; may be repeated",
    )
    add("--model", action="append", choices=names, help="this one; may be repeated")
    add(
        "--size",
        action="append",
        type=_size,
        metavar="SCENARIO=NUMBER",
        help="how many voices, registrations or requests many_voices, bulk_command, "
        "bulk_registration or inline_flood has, or clients parity; may be repeated",
    )
    add("--rounds", type=_positive, help=f"({ROUNDS}; {QUICK_ROUNDS} with --quick)")
    add("--markdown", action="store_true", help="print the table as Markdown")
    add("--out", type=Path, default=_ROOT / "benchmarks" / "results", help="for JSON")
    add("--work", type=Path, default=_ROOT / ".work" / "bench")
    add(
        "--plots",
        type=Path,
        metavar="RESULT.json",
        help="only draw this run; a whole run draws itself",
    )
    add(
        "--plots-out",
        type=Path,
        default=_ROOT / "docs" / "plots",
        help="where pictures go (docs/plots)",
    )
    return parser


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _size(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if name not in {scenario.name for scenario in SCENARIOS}:
        raise ValueError(f"no such scenario: {name}")
    return name, _positive(number)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(f"must be at least 1: {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
