"""The simulated fleet runs at a small size, and its oracle finds what is wrong."""

import subprocess
import sys
import time
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.fleet_simulation_faults import FAULTS
from benchmarks.fleet_simulation_schedule import Simulation

OPTIONS = Namespace(seed=1, active=2, voices=10, at_once=3)
NAME = "active 0"


def test_a_small_fleet_breaks_no_promise():
    small = ["--voices", "2000", "--active", "40", "--servers", "3", "--replicas", "2"]
    run = [sys.executable, "-m", "benchmarks.fleet_simulation", *small, "--freeze", "3"]
    options = ["--steps", "300", "--seed", "1", "--no-save"]
    done = subprocess.run(
        [*run, *options], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 1" in done.stdout
    for kind in FAULTS:
        assert f"| fault: {kind} |" in done.stdout


@pytest.fixture
def of():
    fleet: Any = SimpleNamespace(machines=[], running=lambda _=None: [])
    return Simulation(fleet, OPTIONS)


def answered(of, number, *, text=None, heard=None, is_last_row=False):
    """What a server answers that found this clip; None for no voice."""
    sha = None if number is None else of.sha_of[number]
    fields = {"sha": sha, "text": text, "is_last_row": is_last_row, "ms": 1.0}
    heard = of.heard.get(number) if heard is None else heard
    return {**fields, "find_ms": 1.0, "heard": heard}


async def hear(of, **answer):
    """Have a server answer a request; the names of what is broken."""
    found = answered(of, answer.pop("number"), **answer)

    async def ask(*_, **__):
        return found

    await of.heard_of(SimpleNamespace(ask=ask), NAME, "speak")
    return sorted(kind for kind, lines in of.broken.items() if lines)


async def test_the_voice_that_was_registered_is_right(of):
    of.voices[NAME].ended_by((3, "text"))
    assert await hear(of, number=3, text="text") == []


@pytest.mark.parametrize(
    ("answer", "broken"),
    [
        ({"number": 4}, "wrong voices"),
        ({"number": 3, "text": "other"}, "wrong voices"),
        ({"number": None}, "lost voices"),
        ({"number": 3, "heard": "00"}, "wrong voices"),
    ],
)
async def test_another_voice_is_wrong(of, answer, broken):
    of.voices[NAME].ended_by((3, None))
    assert await hear(of, **answer) == [broken]


@pytest.mark.parametrize("is_last_row", [False, True])
async def test_a_deleted_voice_is_not_spoken(of, is_last_row):
    of.voices[NAME].may = {None}
    answer = await hear(of, number=3, is_last_row=is_last_row)
    assert answer == ["deleted voices spoken"]


async def test_what_was_replaced_is_spoken_by_a_last_row_for_a_while(of):
    voice = of.voices[NAME]
    voice.ended_by((3, None))
    voice.ended_by((4, None))
    assert await hear(of, number=3, is_last_row=True) == []
    voice.stale[3, None] = time.monotonic() - 1
    assert await hear(of, number=3, is_last_row=True) == ["wrong voices"]


async def test_a_change_that_failed_leaves_both_until_one_is_seen(of):
    async def fail():
        return {"error": "StorageUnavailableError"}

    voice = of.voices[NAME]
    voice.ended_by((3, None))
    await of.changed("register", fail, {NAME: (4, None)})
    assert voice.may == {(3, None), (4, None)}
    voice.settled_from = 0.0
    assert await hear(of, number=4) == []
    assert voice.may == {(4, None)}
    assert await hear(of, number=3) == ["wrong voices"]
