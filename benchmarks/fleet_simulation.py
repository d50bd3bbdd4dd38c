"""A simulated fleet at size, whose machines, database and bucket fail.

    python -m benchmarks.fleet_simulation [--voices 1000000] [--active 1500]
        [--servers 20] [--replicas 4] [--steps 20000] [--seed 1] [--no-save]

Servers and replicas are processes with the package's real code, PostgreSQL and the S3
server are real. A schedule drawn by the seed registers, replaces, renames, deletes,
speaks and downloads the active voices, and breaks something every few steps; of the
other voices there are only rows. An oracle knows what each voice may be at each moment.
What no fault excuses is printed, and the exit status is 1. Needs what the tests need:
`make postgres`.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from benchmarks.fleet_simulation_ending import Ending
from benchmarks.fleet_simulation_faults import start
from benchmarks.fleet_simulation_machines import Given, Machine, preload
from benchmarks.fleet_simulation_outside import (
    BucketProxy,
    fill,
    reserve,
    running_databases,
)
from benchmarks.fleet_simulation_schedule import (
    GRACE_SECONDS,
    INVARIANTS,
    Fleet,
    Simulation,
)
from benchmarks.measure import Row, Summary, percentile
from tests import object_store
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.speakers.deletions import RECOVERY_SECONDS
from vllm_tts_cache.store.opening import open_store

RESULTS = Path(__file__).parent / "results"
PREFIX = "voices"
MANY = 100_000  # of so many a server does not look through all again and again
_NO_LIMIT = 1 << 44


async def simulate(options: argparse.Namespace, ended: ExitStack) -> Simulation:
    """Start a fleet, run the schedule on it, and check what is left."""
    preload()
    began = time.monotonic()
    fleet = made(options, ended)
    databases = fleet.databases

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s: {what}", flush=True)

    try:
        await asyncio.gather(*map(start, fleet.machines))
        say("all machines are up")
        simulation = Simulation(fleet, options)
        reserve(databases, options.voices)
        if options.voices >= MANY:
            # So it is on servers that were up while these voices were registered.
            await simulation.register_first()
        filling = fill(databases.url, fleet.store.database, options.voices)
        while num_rows := await asyncio.to_thread(next, filling, 0):
            say(f"{num_rows:,} voices")
        await asyncio.to_thread(databases.add_standby)
        say("the standby streams")
        await simulation.run()
        await Ending(simulation).check()
    finally:
        for each in fleet.running():
            each.kill()
    return simulation


def made(options: argparse.Namespace, ended: ExitStack) -> Fleet:
    """Return a fleet whose machines are not started, with a new database and bucket."""
    work = Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="fleet-")))
    shared = ended.enter_context(running_databases())
    (work / "objects").mkdir()
    bucket = ended.enter_context(object_store.serving(work / "objects"))
    proxy = BucketProxy(int(bucket.endpoint.rpartition(":")[2]), options.seed)
    ended.callback(proxy.close)
    settings: dict[str, Any] = {
        "catalogue_url": shared.url,
        "store_url": bucket.url(PREFIX),
        "catalogue_grace_seconds": GRACE_SECONDS,
        "max_uploaded": options.max_uploaded,
        "audio_max_bytes": _NO_LIMIT,
        "disk_max_bytes": _NO_LIMIT,
        "warm_kv": "off",
    }
    environment = {**bucket.environment, "AWS_ENDPOINT": proxy.endpoint}
    os.environ.update(environment)
    store = open_store(Settings(samples_dir=work / "own", **settings))
    ended.callback(store.close)

    def machine_of(kind: str, number: int, sockets: Sequence[str]) -> Machine:
        name = f"{kind}-{number}"
        given = Given(
            directory=str(work / name),
            settings=settings,
            environment=environment,
            sockets=tuple(sockets),
            seed=options.seed + number,
            recovery_seconds=options.recovery,
        )
        return Machine(kind, name, given)

    sockets = [
        str(work / f"replica-{number}.sock") for number in range(options.replicas)
    ]
    return Fleet(
        servers=[machine_of("server", n, sockets) for n in range(options.servers)],
        replicas=[machine_of("replica", n, [its]) for n, its in enumerate(sockets)],
        databases=shared,
        proxy=proxy,
        objects=work / "objects" / object_store.BUCKET / PREFIX,
        store=store,
    )


def figures(of: Simulation) -> list[tuple[str, str]]:
    """Return the lines of the table."""
    given = of.options
    lines = [
        ("voices in the catalogue", f"{given.voices + given.active:,}"),
        ("of them registered, changed and deleted", f"{given.active:,}"),
        ("servers, replicas", f"{given.servers}, {given.replicas}"),
        *((f"fault: {kind}", f"{num:,}") for kind, num in sorted(of.faults.items())),
        ("fault: bits flipped on the way", f"{of.fleet.proxy.num_flipped:,}"),
        *((what, f"{num:,}") for what, num in sorted(of.counts.items())),
    ]
    for what, times in sorted(of.times.items()):
        shown = percentile(times, 50), percentile(times, 99), max(times)
        unit = "" if what.endswith("MiB") else ", ms"
        numbers = " / ".join(report.number(each) for each in shown)
        lines.append((f"{what}{unit}: p50 / p99 / longest", numbers))
    kinds = dict.fromkeys((*INVARIANTS, *of.broken))
    return lines + [(f"broken: {kind}", f"{len(of.broken[kind]):,}") for kind in kinds]


def rows(of: Simulation) -> list[Row]:
    """Return the figures as a result file keeps them."""
    numbers = {f"broken: {kind}": len(of.broken[kind]) for kind in INVARIANTS}
    numbers |= {f"fault: {kind}": num for kind, num in of.faults.items()}
    kept = [
        Row(what, "", Summary.of([num]), scenario="fleet_simulation")
        for what, num in (numbers | of.counts).items()
    ]
    for what, times in sorted(of.times.items()):
        unit = "MiB" if what.endswith("MiB") else "ms"
        kept.append(Row(what, unit, Summary.of(times), scenario="fleet_simulation"))
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, and print what came of it; return 1 if something broke."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, number in (
        ("voices", 1_000_000),
        ("active", 1_500),
        ("servers", 20),
        ("replicas", 4),
        ("steps", 20_000),
        ("at-once", 12),
        ("steps-per-fault", 100),
        ("max-uploaded", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--freeze", type=float, default=16.0, help="seconds at most")
    parser.add_argument(
        "--recovery",
        type=float,
        default=RECOVERY_SECONDS,
        help="seconds at least from one recovery of a server to the next",
    )
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6)
    )
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}, {machine.describe()}", flush=True)
    begun = report.Begun.now()
    with ExitStack() as ended:
        of = asyncio.run(simulate(options, ended))
    for what, number in figures(of):
        print(f"| {what} | {number} |")
    of.say("the end")
    if not options.no_save:
        print(report.save(begun.ended(vars(options), rows(of)), RESULTS))
    return int(any(of.broken.values()))


if __name__ == "__main__":
    sys.exit(main())
