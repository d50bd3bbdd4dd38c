"""Runs scenarios one after another, on two servers that both stay up."""

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from benchmarks.estimate import SERVERS, Seconds
from benchmarks.models import FISH_SPEECH, MODELS, QWEN3_TTS, Model
from benchmarks.rows import STOCK, Row
from benchmarks.scenarios import (
    churn,
    cold_bystander,
    concurrent_cold,
    core,
    first_request,
    float32_price,
    kv_prefix,
    registry_scale,
    ttfa,
    warm_hit,
)
from benchmarks.sides import open_sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A way to get rows.

    Attributes:
        needs_servers: Runs once for each of its models, beside both servers.
        models: Where it says something.
        full: How long it takes.
        quick: How long it takes in a quick run; None if that leaves it out.
    """

    name: str
    run: Callable[[Bench], list[Row]]
    needs_servers: bool = True
    models: tuple[Model, ...] = MODELS
    full: Seconds
    quick: Seconds | None

    def seconds(self, *, is_quick: bool) -> Seconds:
        return (is_quick and self.quick) or self.full


SCENARIOS = (
    Scenario(
        name=core.NAME,
        run=core.run,
        needs_servers=False,
        full=Seconds(20),
        quick=Seconds(8),
    ),
    Scenario(
        name=churn.NAME,
        run=churn.run,
        needs_servers=False,
        full=Seconds(105),
        quick=Seconds(6),
    ),
    Scenario(
        name=float32_price.NAME,
        run=float32_price.run,
        needs_servers=False,
        full=Seconds(20, 10),
        quick=None,
    ),
    Scenario(
        name=registry_scale.NAME,
        run=registry_scale.run,
        needs_servers=False,
        full=Seconds(200, 24),
        quick=None,
    ),
    Scenario(
        name=warm_hit.NAME,
        run=warm_hit.run,
        full=Seconds(30, 95),
        quick=Seconds(10, 8),
    ),
    Scenario(
        name=ttfa.NAME,
        run=ttfa.run,
        full=Seconds(30, 80),
        quick=Seconds(5, 6),
    ),
    Scenario(
        name=concurrent_cold.NAME,
        run=concurrent_cold.run,
        models=(QWEN3_TTS,),  # with a small codec a cold reference costs little
        full=Seconds(40, 72),
        quick=Seconds(5, 8),
    ),
    Scenario(
        name=cold_bystander.NAME,
        run=cold_bystander.run,
        models=(QWEN3_TTS,),  # with a small codec a cold reference costs little
        full=Seconds(30, 86),
        quick=Seconds(8, 14),
    ),
    Scenario(
        name=kv_prefix.NAME,
        run=kv_prefix.run,
        models=(FISH_SPEECH,),
        full=Seconds(30, 58),
        quick=None,
    ),
    # The last one: its restart leaves ours with another setting.
    Scenario(
        name=first_request.NAME,
        run=first_request.run,
        full=Seconds(90, 60),
        quick=Seconds(2, 4),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run."""

    scenarios: Sequence[Scenario]
    models: Sequence[Model]
    num_rounds: int
    is_quick: bool
    work: Path

    @property
    def alone(self) -> list[Scenario]:
        """Those that have no server beside them."""
        return [s for s in self.scenarios if not s.needs_servers]

    @property
    def served(self) -> list[tuple[Model, list[Scenario]]]:
        """The models that are served, and what runs beside their servers."""
        pairs = []
        for model in self.models:
            beside = [
                s for s in self.scenarios if s.needs_servers and model in s.models
            ]
            if beside:
                pairs.append((model, beside))
        return pairs

    def parts(self) -> list[Seconds]:
        """How long each part of it takes."""
        parts = [s.seconds(is_quick=self.is_quick) for s in self.alone]
        for _, beside in self.served:
            parts.append(SERVERS)
            parts += [s.seconds(is_quick=self.is_quick) for s in beside]
        return parts


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rows of all scenarios, how long each took in seconds, and those that failed."""

    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def run(plan: Plan) -> Outcome:
    """Run the plan; the servers are stopped whatever happens.

    A scenario that fails costs its own rows: an hour of others is not thrown away.
    """
    outcome = Outcome()
    num_runs = len(plan.alone) + sum(len(beside) for _, beside in plan.served)
    with _progress() as progress:
        task = progress.add_task("starting", total=num_runs)
        bench = Bench(
            num_rounds=plan.num_rounds,
            is_quick=plan.is_quick,
            work=plan.work,
            step=lambda text: _say(progress, task, text),
        )
        # Without servers first: nothing else runs meanwhile.
        for scenario in plan.alone:
            _run_one(scenario, bench, outcome)
            progress.advance(task)
        for model, beside in plan.served:
            with (
                _kept(f"the servers of {model.name}", outcome),
                _servers(model, bench, outcome),
            ):
                for scenario in beside:
                    _run_one(scenario, bench, outcome)
                    progress.advance(task)
    return outcome


def _run_one(scenario: Scenario, bench: Bench, outcome: Outcome) -> None:
    began = time.perf_counter()
    bench.step(scenario.name)
    model = bench.model.name if scenario.needs_servers else ""
    what = f"{scenario.name} {model}".strip()
    with _kept(what, outcome):
        rows = scenario.run(bench)
        if scenario.needs_servers:
            rows = [of_model(row, bench.model) for row in rows]
        outcome.rows.extend(rows)
    outcome.seconds[what] = round(time.perf_counter() - began, 1)


@contextmanager
def _kept(what: str, outcome: Outcome) -> Iterator[None]:
    """Keep a failure for the end, and go on."""
    try:
        yield
    except Exception as exc:  # noqa: BLE001  whatever it is, it ends one scenario
        traceback.print_exc()
        outcome.failures.append(f"{what}: {exc}")


def of_model(row: Row, model: Model) -> Row:
    """The row with the model's name, and with what stock was changed by."""
    is_beside_stock = row.reference is not None and row.versus == STOCK
    notes = [row.note, model.stock.note if is_beside_stock else ""]
    note = "; ".join(filter(None, notes))
    return dataclasses.replace(row, model=model.name, note=note)


def _say(progress: Progress, task: TaskID, text: str) -> None:
    progress.update(task, description=text)
    if not progress.console.is_terminal:  # a log shows no bar before its end
        progress.console.print(text)


@contextmanager
def _servers(model: Model, bench: Bench, outcome: Outcome) -> Iterator[None]:
    began = time.perf_counter()
    bench.step(f"writing the checkpoint of {model.name}")
    sides = open_sides(model, bench.work)
    try:
        bench.step(f"starting both servers of {model.name}")
        sides.both(lambda side: side.start())
        bench.use(model, sides)
        took = time.perf_counter() - began
        outcome.seconds[f"starting {model.name}"] = round(took, 1)
        yield
    finally:
        bench.step("stopping the servers")
        sides.both(lambda side: side.stop())


def _progress() -> Progress:
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    description = TextColumn("{task.description}")
    return Progress(*columns, description, console=Console(stderr=True))
