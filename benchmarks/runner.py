"""Runs scenarios one after another, on two servers that both stay up."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from benchmarks.bench import Bench
from benchmarks.rows import Row
from benchmarks.scenarios import (
    cold_bystander,
    concurrent_cold,
    core,
    ttfa,
    warm_hit,
)
from benchmarks.sides import open_sides
from vllm_tts_cache.testing.directories import MARKER
from vllm_tts_cache.testing.qwen3_tts.options import CheckpointOptions


@dataclass(frozen=True, slots=True)
class Scenario:
    """A way to get rows."""

    name: str
    run: Callable[[Bench], list[Row]]
    needs_servers: bool = True


SCENARIOS = (
    Scenario(core.NAME, core.run, needs_servers=False),
    Scenario(warm_hit.NAME, warm_hit.run),
    Scenario(ttfa.NAME, ttfa.run),
    Scenario(concurrent_cold.NAME, concurrent_cold.run),
    Scenario(cold_bystander.NAME, cold_bystander.run),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run."""

    scenarios: Sequence[Scenario]
    num_rounds: int
    is_quick: bool
    work: Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rows of all scenarios, and how long each took in seconds."""

    rows: list[Row]
    seconds: dict[str, float]


def run(plan: Plan) -> Outcome:
    """Run the plan; the servers are stopped whatever happens."""
    outcome = Outcome([], {})
    with _progress() as progress:
        task = progress.add_task("starting", total=len(plan.scenarios))
        bench = Bench(
            num_rounds=plan.num_rounds,
            is_quick=plan.is_quick,
            work=plan.work,
            step=lambda text: _say(progress, task, text),
        )
        # Without servers first: nothing else runs meanwhile.
        ordered = sorted(plan.scenarios, key=lambda scenario: scenario.needs_servers)
        alone = [s for s in ordered if not s.needs_servers]
        served = [s for s in ordered if s.needs_servers]
        for scenario in alone:
            _run_one(scenario, bench, outcome, progress, task)
        if served:
            with _servers(bench, outcome):
                for scenario in served:
                    _run_one(scenario, bench, outcome, progress, task)
    return outcome


def _run_one(
    scenario: Scenario, bench: Bench, outcome: Outcome, progress: Progress, task: TaskID
) -> None:
    began = time.perf_counter()
    bench.step(scenario.name)
    outcome.rows.extend(scenario.run(bench))
    outcome.seconds[scenario.name] = round(time.perf_counter() - began, 1)
    progress.advance(task)


def _say(progress: Progress, task: TaskID, text: str) -> None:
    progress.update(task, description=text)
    if not progress.console.is_terminal:  # a log shows no bar before its end
        progress.console.print(text)


@contextmanager
def _servers(bench: Bench, outcome: Outcome) -> Iterator[None]:
    began = time.perf_counter()
    bench.step("writing the checkpoint")
    model = _checkpoint(bench.work / "checkpoint")
    bench.step("starting both servers")
    sides = open_sides(model, bench.work)
    try:
        sides.both(lambda side: side.start())
        bench.use(sides)
        outcome.seconds["starting"] = round(time.perf_counter() - began, 1)
        yield
    finally:
        bench.step("stopping the servers")
        sides.both(lambda side: side.stop())


def _checkpoint(path: Path) -> Path:
    """Reference encoders of the released sizes, everything else tiny."""
    options = CheckpointOptions(encoders="real")
    wanted = {"family": "qwen3-tts", **dataclasses.asdict(options)}
    marker = path / MARKER
    if not marker.exists() or json.loads(marker.read_text()) != wanted:
        from vllm_tts_cache.testing.qwen3_tts.write import write_qwen3_tts_checkpoint

        write_qwen3_tts_checkpoint(path, options, force=True)
    return path


def _progress() -> Progress:
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    description = TextColumn("{task.description}")
    return Progress(*columns, description, console=Console(stderr=True))
