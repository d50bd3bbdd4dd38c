"""Runs scenarios one after another, on two servers that both stay up."""

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
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
from benchmarks.measure import STOCK, Row
from benchmarks.models import Model
from benchmarks.scenarios import (
    bulk_command,
    bulk_registration,
    cold_bystander,
    cold_neighbour,
    concurrent_cold,
    field,
    first_request,
    inline_flood,
    kv_prefix,
    many_voices,
    parity,
    start_stop,
    ttfa,
    voice_cost,
    warm_hit,
)
from benchmarks.sides import open_sides

# Seconds on two slow cores that nobody else uses: whatever the rounds are, and each.
Seconds = tuple[float, float]
SERVERS: Seconds = (120, 0)  # starting both at once, and stopping them


@dataclass(frozen=True, slots=True)
class Scenario:
    """A way to get rows.

    Attributes:
        is_served: Whether servers stand beside it, once for each model that says that
            it is measured in it; else it needs none, or starts its own.
        full: How long it takes; ``quick``: in a quick run.
        is_in_quick: Whether a quick run has it that does not name it.
    """

    run: Callable[[Bench], list[Row]]
    _: KW_ONLY
    is_served: bool = True
    full: Seconds
    quick: Seconds
    is_in_quick: bool = True

    @property
    def name(self) -> str:
        return self.run.__module__.rpartition(".")[2]


# Small codecs make a cold reference cost little: those that are about it have only
# the model with encoders of the released size.
SCENARIOS = (
    Scenario(
        many_voices.run,
        is_served=False,
        full=(480, 80),
        quick=(150, 25),
        is_in_quick=False,
    ),
    Scenario(voice_cost.run, is_served=False, full=(120, 0), quick=(60, 0)),
    Scenario(
        start_stop.run,
        is_served=False,
        full=(180, 140),
        quick=(90, 120),
        is_in_quick=False,
    ),
    Scenario(warm_hit.run, full=(30, 95), quick=(10, 8)),
    Scenario(ttfa.run, full=(30, 80), quick=(5, 6)),
    Scenario(concurrent_cold.run, full=(40, 72), quick=(5, 8)),
    Scenario(cold_bystander.run, full=(30, 86), quick=(8, 14)),
    Scenario(
        cold_neighbour.run,
        full=(40, 110),
        quick=(15, 30),
        is_in_quick=False,
    ),
    Scenario(
        inline_flood.run,
        full=(30, 60),
        quick=(10, 40),
        is_in_quick=False,
    ),
    Scenario(
        bulk_registration.run,
        full=(30, 450),
        quick=(10, 60),
        is_in_quick=False,
    ),
    # One run of the command, whatever the number of rounds.
    Scenario(
        bulk_command.run,
        full=(900, 0),
        quick=(60, 0),
        is_in_quick=False,
    ),
    # As many requests as clients, by the host's harness, with a decoder of the
    # released size.
    Scenario(field.run, full=(60, 1400), quick=(60, 400), is_in_quick=False),
    Scenario(parity.run, full=(60, 2400), quick=(60, 600), is_in_quick=False),
    Scenario(kv_prefix.run, full=(30, 58), quick=(30, 58), is_in_quick=False),
    # The last one: its restart leaves ours with another setting.
    Scenario(first_request.run, full=(90, 60), quick=(2, 4)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run."""

    scenarios: Sequence[Scenario]
    models: Sequence[Model]
    num_rounds: int
    is_quick: bool
    work: Path
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def alone(self) -> list[Scenario]:
        """Those that have no server beside them."""
        return [s for s in self.scenarios if not s.is_served]

    @property
    def served(self) -> list[tuple[Model, list[Scenario]]]:
        """The models that are served, and what runs beside their servers."""
        pairs = []
        for model in self.models:
            beside = [
                s for s in self.scenarios if s.is_served and s.name in model.scenarios
            ]
            if beside:
                pairs.append((model, beside))
        return pairs

    @property
    def seconds(self) -> float:
        """How long it takes, about."""
        runs = [*self.alone, *(s for _, beside in self.served for s in beside)]
        parts = [SERVERS] * len(self.served)
        parts += [s.quick if self.is_quick else s.full for s in runs]
        return sum(fixed + self.num_rounds * each for fixed, each in parts)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rows of all scenarios, how long each took in seconds, and those that failed."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)


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
            sizes=plan.sizes,
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
    model = bench.model.name if scenario.is_served else ""
    what = f"{scenario.name} {model}".strip()
    with _kept(what, outcome):
        rows = scenario.run(bench)
        if scenario.is_served:
            rows = [of_model(row, bench.model) for row in rows]
        named = (dataclasses.replace(row, scenario=scenario.name) for row in rows)
        outcome.rows.extend(named)
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
