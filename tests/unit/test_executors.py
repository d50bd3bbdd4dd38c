import asyncio
import threading

import pytest

from tests.waiting import SOON_SECONDS, soon
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.entrypoints.speakers.lookups import ReadExecutor
from vllm_tts_cache.errors import ServerBusyError


async def at_once(asked):
    """What a refusal is; what is let in waits for a gate, and for ever."""
    return await asyncio.wait_for(asked, SOON_SECONDS)


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


async def test_a_caller_that_leaves_makes_no_room_before_its_thread_is_free(gate):
    executor = BoundedExecutor("too many", num_threads=1, max_waiting=2)
    began = threading.Event()

    def hold():
        began.set()
        gate.wait()

    leaving = asyncio.create_task(executor.run(hold))
    await asyncio.to_thread(began.wait)
    waiting = [asyncio.create_task(executor.run(gate.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    with pytest.raises(ServerBusyError):
        await at_once(executor.run(gate.wait))
    gate.set()
    await asyncio.gather(*waiting)
    executor.shutdown()


async def test_look_ups_take_no_thread_where_the_catalogue_is_local():
    here = threading.get_ident()
    local, distant = ReadExecutor(is_local=True), ReadExecutor(is_local=False)
    try:
        assert await local.run(threading.get_ident) == here
        assert await distant.run(threading.get_ident) != here
    finally:
        distant.shutdown()


async def test_no_more_look_ups_run_and_wait_than_the_bound_says(gate):
    distant, begun = ReadExecutor(is_local=False), []

    def hold():
        begun.append(threading.get_ident())
        gate.wait()

    looks = [asyncio.create_task(distant.run(hold)) for _ in range(4 + 1024)]
    await asyncio.sleep(0)
    with pytest.raises(ServerBusyError, match="look-ups"):
        await at_once(distant.run(hold))
    await soon(lambda: len(begun) >= 4)
    await asyncio.sleep(0.1)  # a fifth thread would have begun
    assert len(begun) == 4
    gate.set()
    await asyncio.gather(*looks)
    distant.shutdown()
