"""What callers wait for, in its order, and what a look at very many of them touches."""

import sys
import time

import pytest

from tests.encoding_samples import INLINE, REGISTERED, make_key
from tests.in_process_workers import InProcessEngine
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.speakers.lookups import ReadExecutor
from vllm_tts_cache.entrypoints.speakers.poller import EncodePoller
from vllm_tts_cache.entrypoints.speakers.wants import Wants
from vllm_tts_cache.errors import ServerBusyError
from vllm_tts_cache.speaker.rpc_client import AsyncWorkers
from vllm_tts_cache.store.opening import open_store


def joined(wants, name, segment=REGISTERED, *, urgent=False):
    return wants.join(
        make_key(name), name, segment, urgent=urgent, force=False, is_doubted=False
    )


def names(wants, num=100):
    return [want.encoder for want in wants.first(num)]


@pytest.fixture
async def wants():
    return Wants(max_inline=2)


async def test_who_joins_brings_forward_and_who_leaves_takes_that_back(wants):
    first, second = joined(wants, "bulk 1"), joined(wants, "bulk 2")
    assert joined(wants, "bulk 2", urgent=True) is second
    assert names(wants) == ["bulk 2", "bulk 1"]
    wants.leave(second, urgent=True)
    assert names(wants) == ["bulk 1", "bulk 2"]
    wants.leave(first, urgent=False)
    assert names(wants) == ["bulk 2"]
    wants.leave(second, urgent=False)
    assert (names(wants), len(wants)) == ([], 0)


async def test_who_leaves_what_has_landed_puts_it_into_no_line(wants):
    landed = joined(wants, "voice", urgent=True)
    joined(wants, "voice")
    wants.land(landed)
    wants.leave(landed, urgent=True)
    wants.leave(landed, urgent=False)
    assert names(wants) == []


async def test_an_inline_clip_that_is_registered_leaves_its_place_to_another(wants):
    for name in ("clip 1", "clip 2"):
        joined(wants, name, INLINE, urgent=True)
    assert wants.is_full
    with pytest.raises(ServerBusyError):
        joined(wants, "clip 3", INLINE, urgent=True)
    joined(wants, "clip 1")
    assert not wants.is_full
    joined(wants, "clip 3", INLINE, urgent=True)
    assert names(wants) == ["clip 1", "clip 2", "clip 3"]


async def steps_of_a_turn(directory, num_wants):
    """How many bytecodes the poller executes in a turn in which nothing happens."""
    store, lookups = (
        open_store(Settings(samples_dir=directory)),
        ReadExecutor(is_local=True),
    )
    poller = EncodePoller(
        AsyncWorkers(InProcessEngine()),
        store,
        lookups,
        timeout_seconds=100.0,
        max_waiting_inline=64,
    )
    for number in range(num_wants):
        how = {"urgent": False, "force": False, "is_doubted": False}
        poller._wants.join(make_key(number), "codec", REGISTERED, **how)
    await poller._look()
    poller._progress_at = now = time.monotonic()
    num_steps = 0

    def trace(frame, event, arg):
        nonlocal num_steps
        frame.f_trace_opcodes = True
        num_steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        await poller._look()
        poller._is_due(now)
        poller._expire()
    finally:
        sys.settrace(before)
    store.close()
    return num_steps


async def test_a_turn_costs_no_more_when_very_many_wait(tmp_path):
    """It went through all of them 50 times a second, on the event loop."""
    few = await steps_of_a_turn(tmp_path / "few", 100)
    many = await steps_of_a_turn(tmp_path / "many", 2000)
    assert few > 0
    assert many < few + 100
