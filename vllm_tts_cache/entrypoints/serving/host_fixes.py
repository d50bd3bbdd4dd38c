"""Fixes of the host around our calls and requests.

`attach.PATCHES` has their reasons.
"""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Collection, Coroutine
from functools import wraps
from typing import Any

from vllm_omni.engine.messages import CollectiveRPCResultMessage, ErrorMessage

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.logs import ThrottledLog, logger
from vllm_tts_cache.speaker import rpc_client as rpc
from vllm_tts_cache.speaker.family import families

# How long before its timeout a caller is answered with the results so far.
EARLIER_SECONDS = 1.0
# How long a call for which one answer is enough waits for the others after the first:
# these workers are in a long step, or dead.
LATER_SECONDS = 2.0
_ONE_WILL_DO = {m.name for m in (rpc.WANT, rpc.ENCODING, rpc.STATS, rpc.DECODER_STATS)}
_NEEDS_ALL = {m.name for m in (rpc.DELETE, rpc.DELETE_STATES) if m.needs_all}

# Keeps tasks alive: the event loop has only weak references to them.
_running: set[asyncio.Task[Any]] = set()

throttled = ThrottledLog()

LOOK_SECONDS = 0.05
# Where there are several API processes, the host kills them after 5 seconds.
SHARED_SECONDS = 2.0
Method = Callable[..., Coroutine[Any, Any, Any]]


def calling_beside(host: Method) -> Method:
    """Handle our calls of workers beside later messages, and end each in time.

    All replicas are called at once.
    """

    async def handle(self: Any, msg: Any) -> None:
        if msg.method.startswith(rpc.METHOD_PREFIX):
            _started(_answer(self, msg))
        else:
            await host(self, msg)

    return handle


async def _answer(orchestrator: Any, message: Any) -> None:
    called = [
        (pool, replica)
        for pool in orchestrator.stage_pools
        if pool.stage_id in message.stage_ids
        for replica in pool.live_replica_ids()
    ]
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
        for pool, replica in called
    ]
    late = await _late_calls(
        calls,
        seconds=message.timeout - EARLIER_SECONDS,
        is_one_enough=message.method in _ONE_WILL_DO,
    )
    for (pool, _), call in zip(called, calls, strict=True):
        # A diffusion client would keep the answer to a cancelled call for ever; its
        # calls end by themselves.
        if call in late and pool.stage_type != "diffusion":
            call.cancel()
    has_answer = any(map(_is_answer, calls))
    if late and (message.method in _NEEDS_ALL or not has_answer):
        return  # the caller times out, and reports busy workers
    await orchestrator.rpc_async_queue.put(
        CollectiveRPCResultMessage(
            rpc_id=message.rpc_id,
            method=message.method,
            stage_ids=[pool.stage_id for pool, _ in called],
            results=[_result(call, late) for call in calls],
        )
    )


async def _late_calls(
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
    """Whether workers answered: the host's own error is no list."""
    has_failed = not call.done() or call.cancelled() or call.exception() is not None
    return not has_failed and isinstance(call.result(), list)


def _result(call: "asyncio.Task[Any]", late: set["asyncio.Task[Any]"]) -> Any:
    """Return a replica's answer, or the host's form of an answer if it failed."""
    reason = "no answer in time"
    if call not in late:
        if (error := call.exception()) is None:
            return call.result()
        reason = str(error) or repr(error)
    return {"supported": False, "error": reason}


def failing_alone(host: Method) -> Method:
    """Fail only the one request that cannot be sent to the engine, for any error."""

    async def dispatch_or_fail(
        self: Any, dispatch: Any, *, req_id: str, stage_id: int, **named: Any
    ) -> bool:
        named |= {"req_id": req_id, "stage_id": stage_id}
        try:
            return await host(self, dispatch, **named)
        except Exception as exc:  # noqa: BLE001  raising here would end the engine
            reason = f"The request cannot be sent to the engine: {exc!r:.300}"
            throttled.warn_of("sending a request", "%s (stage %s)", reason, stage_id)
            await self._fail_request_client_error(req_id, stage_id, reason)
            return False

    return dispatch_or_fail


def waiting_for_outputs(host: Callable[..., Any]) -> Callable[..., Any]:
    """Make our families' engines wait unless ``VLLM_OMNI_EVENT_DRIVEN_ORCH`` is set."""
    ours = {family.waits_for_outputs_of for family in families()} - {""}

    @wraps(host)
    def create(self: Any, **kwargs: Any) -> Any:
        # Both, as an engine reads its pipeline's default before it loads this plugin.
        pipeline = self.pipeline_config
        if pipeline is not None and pipeline.model_type in ours:
            self._event_driven_orch_default = True
            kwargs["event_driven_orch_default"] = True
        return host(self, **kwargs)

    return create


def quiet_failed_requests() -> None:
    """Make the host log only the ``log_text`` of our errors; idempotent."""
    for module in ("serving_speech", "serving_speech_stream"):
        logging.getLogger(f"vllm_omni.entrypoints.openai.{module}").addFilter(_quiet)


def _quiet(record: logging.LogRecord) -> bool:
    """Log `TTSCacheError.log_text` of our errors, without a traceback."""
    args = record.args if isinstance(record.args, tuple) else ()
    for value in args:
        error = value if isinstance(value, BaseException) else None
        while error is not None and not isinstance(error, TTSCacheError):
            error = error.__cause__
        if error is not None:
            record.args = tuple(error.log_text if v is value else v for v in args)
            record.exc_info = record.exc_text = None
    return True


def stopping_well(serve_http: Method, drain_seconds: float) -> Method:
    """Make ``serve_http`` drain requests for ``drain_seconds`` at a signal."""

    async def serve(app: Any, *args: Any, **options: Any) -> Any:
        Stop(app.state, asyncio.get_running_loop(), drain_seconds).expect()
        # Read now: the application's state is deleted when the host has ended.
        speech = app.state.openai_serving_speech
        last_part = await serve_http(app, *args, **options)

        async def shut_down_after() -> None:
            try:
                await last_part
            finally:
                if speech is not None:
                    speech.shutdown()

        return shut_down_after()

    return serve


class Stop:
    """Stops one API process, whose ``state`` has the host's engine and server."""

    def __init__(
        self, state: Any, loop: asyncio.AbstractEventLoop, drain_seconds: float
    ):
        self._state = state
        self._loop = loop
        self._seconds = drain_seconds
        if (getattr(state.args, "api_server_count", None) or 1) > 1:
            self._seconds = min(drain_seconds, SHARED_SECONDS)
        self._is_over = threading.Event()

    def expect(self) -> None:
        """Make the engine's shutdown drain requests before, and end the rest after."""
        engine = self._state.engine_client
        host = engine.shutdown

        def shutdown(timeout: float | None = None) -> None:
            if _is_on_a_loop():  # the server has ended by itself
                return host(timeout=timeout)
            self._drain()
            try:
                host(timeout=timeout)
            finally:
                self._loop.call_soon_threadsafe(self._end_requests)

        engine.shutdown = shutdown

    def _drain(self) -> None:
        """Accept no new request, and wait for the running ones."""
        asyncio.run_coroutine_threadsafe(self._stop_accepting(), self._loop).result()
        for _ in range(int(self._seconds / LOOK_SECONDS)):
            if not self._num_requests or self._is_over.wait(LOOK_SECONDS):
                break
        if num := self._num_requests:
            logger.warning(
                "Stopping: cutting %d requests off; SPEAKER_DRAIN_SECONDS is how long "
                "they may take.",
                num,
            )

    @property
    def _num_requests(self) -> int:
        return len(self._state.server.server_state.tasks)

    async def _stop_accepting(self) -> None:
        server = self._state.server
        for listening in getattr(server, "servers", ()):  # empty before the start
            listening.close()
        for connection in list(server.server_state.connections):
            # uvicorn closes an idle connection at once, another once it is answered. It
            # would cut off WebSockets, which have no cycle.
            if hasattr(connection, "cycle"):
                connection.shutdown()
        if self._num_requests:
            logger.info(
                "Stopping: %d requests have %g seconds; Ctrl-C once more ends them.",
                self._num_requests,
                self._seconds,
            )
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._is_over.set)

    def _end_requests(self) -> None:
        for request in list(self._state.engine_client.request_states.values()):
            id_, reason = request.request_id, "the server was stopped"
            message = ErrorMessage(error=reason, fatal=True, request_id=id_)
            request.queue.put_nowait(message)


def _is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
