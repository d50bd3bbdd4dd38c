"""Our calls of workers, for which nobody else in the engine waits.

vLLM-Omni 0.30 handles what API processes send it one by one, and waits for each call:
a worker in a long step holds up requests that have nothing to do with it. One whose
machine is gone holds up all of them for ever, as the call's own timeout is not kept.
Ours run beside what comes after them, ask all replicas at once, and end.
"""

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any

from vllm_omni.engine.messages import CollectiveRPCResultMessage
from vllm_omni.engine.orchestrator import OrchestratorBase

from vllm_tts_cache.speaker.rpc_client import (
    DECODER_STATS,
    DELETE,
    DELETE_STATES,
    ENCODING,
    METHOD_PREFIX,
    STATS,
    WANT,
)

# Who asks is told what there is before it gives up by itself.
EARLIER_SECONDS = 1.0
# Once one replica has answered, of a call for which that is enough; the others are in a
# long step, or dead.
LATER_SECONDS = 2.0
_ONE_WILL_DO = {method.name for method in (WANT, ENCODING, STATS, DECODER_STATS)}
_NEEDS_ALL = {method.name for method in (DELETE, DELETE_STATES) if method.needs_all}

# The loop itself keeps weak references only.
_running: set[asyncio.Task[Any]] = set()


def install() -> None:
    """Have the host's orchestrators handle our calls so; again, it changes nothing."""
    host = OrchestratorBase._handle_collective_rpc
    if host.__module__ == __name__:
        return

    async def handle(self: Any, msg: Any) -> None:
        if not msg.method.startswith(METHOD_PREFIX):
            await host(self, msg)
            return
        _started(_answer(self, msg))

    OrchestratorBase._handle_collective_rpc = handle


async def _answer(orchestrator: Any, message: Any) -> None:
    pools = [
        pool for pool in orchestrator.stage_pools if pool.stage_id in message.stage_ids
    ]
    asked = [(pool, replica) for pool in pools for replica in pool.live_replica_ids()]
    calls = [
        _started(
            pool.collective_rpc(
                replica_id=replica,
                method=message.method,
                timeout=message.timeout,
                args=tuple(message.args),
                kwargs=dict(message.kwargs or {}),
            )
        )
        for pool, replica in asked
    ]
    late = await _late(
        calls,
        seconds=message.timeout - EARLIER_SECONDS,
        is_one_enough=message.method in _ONE_WILL_DO,
    )
    for (pool, _), call in zip(asked, calls, strict=True):
        # A diffusion client keeps the answer to a call that nobody waits for, for ever;
        # it ends its calls by itself.
        if call in late and pool.stage_type != "diffusion":
            call.cancel()
    has_answer = any(map(_is_answer, calls))
    if late and (message.method in _NEEDS_ALL or not has_answer):
        return  # who asks gives up in a moment, and says that they are busy
    await orchestrator.rpc_async_queue.put(
        CollectiveRPCResultMessage(
            rpc_id=message.rpc_id,
            method=message.method,
            stage_ids=[pool.stage_id for pool, _ in asked],
            results=[_result(call, late) for call in calls],
        )
    )


async def _late(
    calls: Collection["asyncio.Task[Any]"], *, seconds: float, is_one_enough: bool
) -> set["asyncio.Task[Any]"]:
    """Return the calls that have not ended in time."""
    clock = asyncio.get_running_loop().time
    until, pending = clock() + seconds, set(calls)
    while pending and (left := until - clock()) > 0:
        done, pending = await asyncio.wait(
            pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
        )
        if is_one_enough and any(map(_is_answer, done)):
            until = min(until, clock() + LATER_SECONDS)
    return pending


def _started(work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    task = asyncio.create_task(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


def _is_answer(call: "asyncio.Task[Any]") -> bool:
    """Whether workers answered; what is no list is the host's word for a failure."""
    if not call.done() or call.cancelled() or call.exception() is not None:
        return False
    return isinstance(call.result(), list)


def _result(call: "asyncio.Task[Any]", late: set["asyncio.Task[Any]"]) -> Any:
    if call in late:
        return _failed("no answer in time")
    if (error := call.exception()) is not None:
        return _failed(str(error) or repr(error))
    return call.result()


def _failed(reason: str) -> dict[str, Any]:
    """As the host says it of a replica."""
    return {"supported": False, "error": reason}
