"""Our calls of workers in the host's orchestrator, where replicas say nothing."""

import asyncio
import uuid
from typing import Any

import pytest
from vllm_omni.engine.messages import CollectiveRPCRequestMessage
from vllm_omni.engine.orchestrator import OrchestratorBase
from vllm_omni.engine.stage_pool import StagePool

from tests.waiting import soon
from vllm_tts_cache import patch_once
from vllm_tts_cache.entrypoints.serving import host_fixes
from vllm_tts_cache.speaker.rpc_client import DELETE, FAILED, STATS, TIMEOUT_SECONDS


class Client:
    """What the pool has of a replica."""

    stage_type = "llm"

    def __init__(self, *, is_silent=False, error=None, seconds=0.0):
        self.is_silent, self.error, self.seconds = is_silent, error, seconds
        self.was_cancelled = False

    async def collective_rpc_async(self, method, timeout, args, kwargs):
        if self.is_silent:
            try:
                await asyncio.Event().wait()
            finally:
                self.was_cancelled = True
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return [method]


@pytest.fixture
def orchestrator(monkeypatch):
    """``of`` gives one whose talker has these replicas; all others are the host's."""
    name = "_handle_collective_rpc"
    monkeypatch.setattr(OrchestratorBase, name, getattr(OrchestratorBase, name))
    patch_once(OrchestratorBase, name, host_fixes.calling_beside)
    monkeypatch.setattr(host_fixes, "LATER_SECONDS", 0.05)

    def of(*clients):
        made: Any = OrchestratorBase.__new__(OrchestratorBase)
        pool = StagePool.__new__(StagePool)
        pool.stage_id, pool.clients = 0, list(clients)
        made.stage_pools, made.num_stages = [pool], 1
        made.rpc_async_queue = asyncio.Queue()
        return made

    return of


def call_of(method, timeout=TIMEOUT_SECONDS, stage_ids=(0,)):
    return CollectiveRPCRequestMessage(
        rpc_id=uuid.uuid4().hex,
        method=method,
        timeout=timeout,
        args=(),
        kwargs={},
        stage_ids=list(stage_ids),
    )


async def answer(orchestrator):
    return await asyncio.wait_for(orchestrator.rpc_async_queue.get(), 60)


async def ended(silent):
    """Whether the call of a replica that says nothing was given up, and all is over."""
    await soon(lambda: silent.was_cancelled and not host_fixes._running)
    return True


async def test_nobody_waits_for_a_replica_that_says_nothing(orchestrator):
    dead = Client(is_silent=True)
    made = orchestrator(dead, None, Client(), Client(error=OSError("gone")))
    call = call_of(STATS.name)
    await asyncio.wait_for(made._handle_collective_rpc(call), 60)
    told = await answer(made)
    assert told.rpc_id == call.rpc_id
    assert told.stage_ids == [0, 0, 0]
    assert [type(result) for result in told.results] == [dict, list, dict]
    assert "no answer" in told.results[0]["error"]
    assert "gone" in told.results[2]["error"]
    assert await ended(dead)


async def test_what_all_must_answer_is_not_answered_for_one_that_does_not(orchestrator):
    made = orchestrator(Client(is_silent=True), Client())
    earlier = host_fixes.EARLIER_SECONDS
    await made._handle_collective_rpc(call_of(DELETE.name, timeout=earlier + 0.1))
    assert await ended(made.stage_pools[0].clients[0])
    assert made.rpc_async_queue.empty()  # whose caller's own time ends a moment later


async def test_a_failure_is_no_answer_that_others_are_not_waited_for(orchestrator):
    busy, failed = Client(seconds=0.3), Client(error=OSError("gone"))
    made = orchestrator(failed, busy)
    await made._handle_collective_rpc(call_of(STATS.name))
    assert [type(result) for result in (await answer(made)).results] == [dict, list]


async def test_of_why_requests_failed_no_answer_is_missing(orchestrator):
    made = orchestrator(Client(), Client(seconds=0.3))
    await made._handle_collective_rpc(call_of(FAILED.name))
    assert (await answer(made)).results == [[FAILED.name]] * 2


async def test_the_hosts_own_calls_are_handled_by_the_host(orchestrator):
    made = orchestrator(Client())
    await made._handle_collective_rpc(call_of("is_sleeping"))
    assert made.rpc_async_queue.get_nowait().results == [["is_sleeping"]]
