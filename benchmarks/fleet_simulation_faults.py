"""What is broken in the simulated fleet, and mended again."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.fleet_simulation_machines import Machine

if TYPE_CHECKING:
    from benchmarks.fleet_simulation_schedule import Fleet, Simulation

# Kind -> how often it is drawn, beyond once.
FAULTS = {
    "server killed": 8,
    "replica killed": 4,
    "server frozen": 2,
    "machine's clock moved": 8,
    "database's clock moved": 2,
    "database's connections cut": 4,
    "database restarted": 2,
    "failover": 1,
    "failover to a standby that is behind": 1,
    "bucket refuses": 1,
    "bucket answers 404": 3,
    "bucket answers 503": 3,
    "bucket is slow": 2,
    "bucket flips bits": 4,
    "object damaged": 2,
    "copy damaged": 6,
    "copy lost": 6,
}
# Those during which requests may take longer; the others are over at once.
LONG = ("server", "replica", "database", "failover", "bucket")
MACHINE_CLOCK = (-86_400.0, -3_600.0, -61.0, -5.0, 5.0, 61.0, 3_600.0, 86_400.0)
DATABASE_CLOCK = (-3_600.0, -30.0, 2.0, 7.0, 60.0, 7_200.0)
MODES = {"refuses": "refuse", "bits": "flipped"}  # by the last word of a fault
DOWN_SECONDS = 0.5, 10.0
BUCKET_SECONDS = 1.0, 5.0
BEHIND_SECONDS = 1.0, 5.0
# A server that removes objects by a list of the old database goes on for so long.
REMOVING_SECONDS = 3.0
_ROWS = "SELECT name, audio_sha256, ref_text FROM speaker WHERE tenant = 'default'"
_OBJECTS = "SELECT object_name FROM stored_file WHERE audio_sha256 = ANY(%s)"
_KNOWN = """
SELECT object_name FROM stored_file WHERE audio_sha256 = ANY(%s) UNION ALL
SELECT object_name FROM loose_object"""


def kind_of(fault: str) -> str:
    """Return what a fault is of, of which one is broken at a time, or ``machine``."""
    first = fault.split()[0]
    if first in ("database", "database's", "failover"):
        return "database"
    return "bucket" if first == "bucket" else "machine"


def flip_a_bit(path: Path, share: float) -> bool:
    """Damage a file where it lies; False if it is not there (any more)."""
    try:
        data = bytearray(path.read_bytes())
        data[int(share * len(data))] ^= 0x10
        path.write_bytes(data)
    except (OSError, IndexError):
        return False
    return True


async def start(machine: Machine) -> None:
    """Start a machine, again while it refuses: its supervisor does so."""
    while why := await machine.start():
        print(f"{machine.name} does not start: {why}", flush=True)
        await asyncio.sleep(1.0)


def known_objects(fleet: "Fleet", shas: Iterable[str]) -> set[str]:
    """Return objects of these audios that the catalogue has."""
    return {name for (name,) in fleet.databases.query(_OBJECTS, list(shas))}


def lost_objects(fleet: "Fleet", shas: Iterable[str]) -> set[str]:
    """Return those of `known_objects` that the bucket has not."""
    known = known_objects(fleet, shas)
    return {name for name in known if not (fleet.objects / name).is_file()}


def strays(fleet: "Fleet") -> set[str]:
    """Return names of objects that the catalogue does not know."""
    there = fleet.stored_objects()
    shas = {name.split("/")[2] for name in there}
    rows = fleet.databases.query(_KNOWN, list(shas))
    return there - {name for (name,) in rows}


class Faults:
    """Breaks one thing, and mends it."""

    def __init__(self, simulation: "Simulation"):
        self._of, self._fleet = simulation, simulation.fleet
        self._databases, self._proxy = self._fleet.databases, self._fleet.proxy
        self._chance = simulation.chance

    async def of(self, kind: str, mended: Callable[[], None]) -> None:
        """Break something; return when it is mended, if it can be.

        ``mended`` is called when it is, if more has to be done before the next one.
        """
        databases, last = self._databases, kind.split()[-1]
        match kind_of(kind):
            case "bucket":
                self._proxy.mode = MODES.get(last, last)
                await asyncio.sleep(self._chance.uniform(*BUCKET_SECONDS))
                self._proxy.mode = "whole"
            case "database" if kind.startswith("failover"):
                await self._fail_over(mended, is_behind=last == "behind")
            case "database":
                ahead = partial(
                    databases.set_clock, self._chance.choice(DATABASE_CLOCK)
                )
                acts = {"moved": ahead, "cut": databases.cut}
                await asyncio.to_thread(acts.get(last, databases.restart))
            case _:
                await self._of_machine(kind)

    async def _of_machine(self, kind: str) -> None:
        match kind:
            case "server killed":
                await self._kill(self._fleet.servers)
            case "replica killed":
                await self._kill(self._fleet.replicas)
            case "server frozen":
                await self._freeze()
            case "machine's clock moved":
                machine = self._chance.choice(self._fleet.running())
                ahead = self._chance.choice(MACHINE_CLOCK)
                await machine.ask("set_clock", ahead_seconds=ahead)
            case "object damaged":
                self._damage_object()
            case _:
                self._damage_copy(is_lost=kind == "copy lost")

    async def _kill(self, machines: list[Machine]) -> None:
        if len(running := self._fleet.running(machines)) > 1:
            machine = self._chance.choice(running)
            machine.kill()
            await asyncio.sleep(self._chance.uniform(*DOWN_SECONDS))
            await start(machine)

    async def _freeze(self) -> None:
        if len(running := self._fleet.running(self._fleet.servers)) > 1:
            machine = self._chance.choice(running)
            machine.freeze()
            await asyncio.sleep(self._chance.uniform(1.0, self._of.options.freeze))
            machine.thaw()

    async def _fail_over(self, mended: Callable[[], None], *, is_behind: bool) -> None:
        databases, of = self._databases, self._of
        if is_behind:
            await asyncio.to_thread(databases.leave_standby_behind)
            await asyncio.sleep(self._chance.uniform(*BEHIND_SECONDS))
        await asyncio.to_thread(databases.promote)
        if is_behind:
            of.take_over(await asyncio.to_thread(databases.query, _ROWS))
            await asyncio.sleep(REMOVING_SECONDS)
            lost = partial(lost_objects, self._fleet, of.number_of)
            of.brought_back |= await asyncio.to_thread(lost)
            of.strays |= await asyncio.to_thread(strays, self._fleet)
        mended()
        await asyncio.to_thread(databases.add_standby)

    def _damage_object(self) -> None:
        if names := sorted(self._fleet.stored_objects()):
            name = self._chance.choice(names)
            if flip_a_bit(self._fleet.objects / name, self._chance.random()):
                self._of.damaged.add(name.split("/")[2])

    def _damage_copy(self, *, is_lost: bool) -> None:
        machine = self._chance.choice(self._fleet.machines)
        if copies := self._fleet.copies(machine):
            path = self._chance.choice(copies)
            if is_lost:
                path.unlink(missing_ok=True)
            else:
                flip_a_bit(path, self._chance.random())
