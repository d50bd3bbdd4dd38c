"""``python -m benchmarks.precision``: what a reference encoder's precision is worth."""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from benchmarks import machine, precision_report, precision_run, results
from benchmarks.disturbance import Disturbance
from benchmarks.precision_report import Measurement
from benchmarks.precision_run import Plan
from benchmarks.precision_variants import Meter
from vllm_tts_cache.testing.encoder_size import ENCODER_SIZES
from vllm_tts_cache.testing.families import FISH_SPEECH, QWEN3_TTS

_ROOT = Path(__file__).parents[1]
_FAMILIES = {family.name: family for family in (QWEN3_TTS, FISH_SPEECH)}
_TABLE_WIDTH = 170

_EXAMPLES = """\
examples:
  python -m benchmarks.precision
      tiny encoders of both families, on the GPU if there is one
  OMP_NUM_THREADS=2 python -m benchmarks.precision --encoders tiny --encoders real
      the released sizes too: of those, on a CPU, a clip of 3 s only
  python -m benchmarks.precision --device cuda --encoders real --seconds 3 10 30
      with TF32, and what an encode does to a decode loop beside it
  python -m benchmarks.precision --family fish-speech --json fish.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the JSON, print the tables."""
    plan, given = _plan(arguments)
    began, (revision, is_dirty) = datetime.now(timezone.utc), machine.revision()
    device, load_before = _device_name(plan.meter.device), machine.load()
    found = Found()

    def run() -> results.Run:
        return results.Run(
            began=began,
            revision=revision,
            is_dirty=is_dirty,
            machine={
                **machine.describe(),
                "device": device,
                "load_before": load_before,
                "load_after": machine.load(),
            },
            versions=machine.versions(),
            settings={**_settings(plan), "complete": found.is_complete(plan)},
            rows=(),
        )

    default = _ROOT / "benchmarks" / "results" / precision_report.file_name(run())
    path = given.json or default
    # What was measured before Ctrl-C took its time too.
    with contextlib.suppress(KeyboardInterrupt):
        for _ in _measure(plan, found):
            precision_report.save(run(), found.rows, found.disturbances, path)
    _show(found, f"{device}, {torch.get_num_threads()} CPU threads")
    print(path, file=sys.stderr)
    return 0


@dataclass(slots=True)
class Found:
    """What there is so far; without a GPU, no disturbances."""

    rows: list[Measurement] = field(default_factory=list)
    disturbances: dict[str, list[Disturbance]] = field(default_factory=dict)

    def is_complete(self, plan: Plan) -> bool:
        return len(self.rows) == plan.num_measurements


def _measure(plan: Plan, found: Found) -> Iterator[None]:
    """Add to what is found; it can be saved after every encoder."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=plan.num_measurements)

        def report(text: str) -> None:
            progress.update(task, description=text)

        for subject in precision_run.subjects(plan, report):
            # A line each, for a log, which has no progress bar.
            progress.console.print(f"{subject.label}, after {len(found.rows)} rows")
            if plan.has_gpu:
                report(f"{subject.label}: decode loop")
                found.disturbances[subject.label] = precision_run.disturb(plan, subject)
            for row in precision_run.measure(plan, subject, report):
                found.rows.append(row)
                progress.advance(task)
            yield


def _show(found: Found, device: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    console.print(precision_report.rich_table(found.rows))
    for label, rows in found.disturbances.items():
        console.print(label, precision_report.disturbance_table(rows))
    if not found.disturbances:
        console.print("Disturbance of a decode loop: not measured, needs CUDA.")
    console.print(f"On {device}.")


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "checkpoint": "random weights",
        "seconds": {size: list(plan.seconds[size]) for size in plan.sizes},
        "samples": plan.meter.num_samples,
        "limit_seconds": plan.meter.limit_seconds,
        "disturb_seconds": plan.disturb_seconds,
        "threads": torch.get_num_threads(),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return machine.describe()["cpu"]


def _plan(arguments: Sequence[str] | None) -> tuple[Plan, argparse.Namespace]:
    given = _parser().parse_args(arguments)
    is_slow = given.device == "cpu"
    seconds = given.seconds or [3.0, 10.0, 30.0]
    plan = Plan(
        families=[_FAMILIES[name] for name in given.family or _FAMILIES],
        sizes=given.encoders or ["tiny"],
        seconds={
            "tiny": seconds,
            "real": given.seconds or ([3.0] if is_slow else seconds),
        },
        sizes_with_speech=["tiny"] if is_slow else ENCODER_SIZES,
        meter=Meter(
            device=torch.device(given.device),
            num_samples=given.samples,
            limit_seconds=given.limit,
        ),
        disturb_seconds=given.disturb_seconds,
        work=given.work.absolute(),
    )
    return plan, given


def _parser() -> argparse.ArgumentParser:
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.precision",
        description="Time, memory and codes of the reference encoders in float32, with "
        "TF32, in batches and in bfloat16, on checkpoints with random weights.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--family",
        action="append",
        choices=list(_FAMILIES),
        help="may be repeated (both)",
    )
    add(
        "--encoders",
        action="append",
        choices=ENCODER_SIZES,
        help="may be repeated (tiny)",
    )
    add(
        "--device",
        # What is not there cannot be chosen.
        choices=["cpu", "cuda"] if has_cuda else ["cpu"],
        default="cuda" if has_cuda else "cpu",
    )
    add("--seconds", type=_positive, nargs="+", help="of synthetic clips (3 10 30)")
    add("--samples", type=int, default=3, help="timed runs of each (3)")
    add(
        "--limit",
        type=_positive,
        default=180.0,
        metavar="SECONDS",
        help="for all runs of a variant on a clip (180); past it, not measured",
    )
    add("--disturb-seconds", type=_positive, default=5.0, help="each condition (5)")
    add("--json", type=Path, metavar="FILE", help="(benchmarks/results/...)")
    add("--work", type=Path, default=_ROOT / ".work" / "precision")
    return parser


def _positive(text: str) -> float:
    if (number := float(text)) <= 0:
        raise ValueError(f"must be above 0: {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
