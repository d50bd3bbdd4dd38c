"""What we mend in the host around our calls and requests.

`attach.PATCHES` has the reasons.
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
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.speaker.family import families
from vllm_tts_cache.speaker.rpc_client import (
    DECODER_STATS,
    DELETE,
    DELETE_STATES,
    ENCODING,
    METHOD_PREFIX,
    STATS,
    WANT,
)

# The caller is answered with what there is before it gives up by itself.
EARLIER_SECONDS = 1.0
# Once one replica has answered, of a call for which that is enough; the others are in a
# long step, or dead.
LATER_SECONDS = 2.0
_ONE_WILL_DO = {method.name for method in (WANT, ENCODING, STATS, DECODER_STATS)}
_NEEDS_ALL = {method.name for method in (DELETE, DELETE_STATES) if method.needs_all}

# The loop itself keeps weak references only.
_running: set[asyncio.Task[Any]] = set()

logger = logging.getLogger("vllm.vllm_tts_cache")
throttled = ThrottledLog(logger)

LOOK_SECONDS = 0.05
# The host kills API processes, of which there are several, after 5 seconds.
SHARED_SECONDS = 2.0
Method = Callable[..., Coroutine[Any, Any, Any]]


def calling_beside(host: Method) -> Method:
    """Handle our calls of workers beside what comes after them, and end each in time.

    All replicas are called at once.
    """

    async def handle(self: Any, msg: Any) -> None:
        if not msg.method.startswith(METHOD_PREFIX):
            await host(self, msg)
            return
        _started(_answer(self, msg))

    return handle


async def _answer(orchestrator: Any, message: Any) -> None:
    pools = [
        pool for pool in orchestrator.stage_pools if pool.stage_id in message.stage_ids
    ]
    called = [(pool, replica) for pool in pools for replica in pool.live_replica_ids()]
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
    late = await _late(
        calls,
        seconds=message.timeout - EARLIER_SECONDS,
        is_one_enough=message.method in _ONE_WILL_DO,
    )
    for (pool, _), call in zip(called, calls, strict=True):
        # A diffusion client keeps the answer to a call without a caller for ever;
        # it ends its calls by itself.
        if call in late and pool.stage_type != "diffusion":
            call.cancel()
    has_answer = any(map(_is_answer, calls))
    if late and (message.method in _NEEDS_ALL or not has_answer):
        return  # the caller gives up in a moment, and says that they are busy
    await orchestrator.rpc_async_queue.put(
        CollectiveRPCResultMessage(
            rpc_id=message.rpc_id,
            method=message.method,
            stage_ids=[pool.stage_id for pool, _ in called],
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
    has_failed = not call.done() or call.cancelled() or call.exception() is not None
    return not has_failed and isinstance(call.result(), list)


def _result(call: "asyncio.Task[Any]", late: set["asyncio.Task[Any]"]) -> Any:
    """Return what a replica answered, or what the host says of one that failed."""
    reason = "no answer in time"
    if call not in late:
        if (error := call.exception()) is None:
            return call.result()
        reason = str(error) or repr(error)
    return {"supported": False, "error": reason}


def failing_alone(host: Method) -> Method:
    """Fail a request alone that cannot be sent to the engine, whatever the error."""

    async def dispatch_or_fail(
        self: Any, dispatch: Any, *, req_id: str, stage_id: int, **named: Any
    ) -> bool:
        named |= {"req_id": req_id, "stage_id": stage_id}
        try:
            sent: bool = await host(self, dispatch, **named)
        except Exception as exc:  # noqa: BLE001  raising here would end the engine
            reason = f"The request cannot be sent to the engine: {exc!r:.300}"
            throttled.warn_of("sending a request", "%s (stage %s)", reason, stage_id)
            await self._fail_request_client_error(req_id, stage_id, reason)
            return False
        return sent

    return dispatch_or_fail


def waiting_for_outputs(host: Callable[..., Any]) -> Callable[..., Any]:
    """Have engines of our families wait; ``VLLM_OMNI_EVENT_DRIVEN_ORCH`` decides."""
    ours = {family.waits_for_outputs_of for family in families()} - {""}

    @wraps(host)
    def create(self: Any, **kwargs: Any) -> Any:
        # Here, as an engine reads its pipeline's default before it loads us.
        pipeline = self.pipeline_config
        if pipeline is not None and pipeline.model_type in ours:
            self._event_driven_orch_default = True
            kwargs["event_driven_orch_default"] = True
        return host(self, **kwargs)

    return create


def quiet_failed_requests() -> None:
    """Have the host log no more of our errors than their ``log_text``; once."""
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
    """Have the host's ``serve_http`` drain requests for so long at a signal."""

    async def serve(app: Any, *args: Any, **options: Any) -> Any:
        Stop(app.state, asyncio.get_running_loop(), drain_seconds).expect()
        # The host would shut it down by the application's state, which is deleted then.
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
    """The end of one API process, whose ``state`` has the host's engine and server."""

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
        """Take part in how the host stops its engine."""
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
        """Take no new request, and wait for those that are under way."""
        asyncio.run_coroutine_threadsafe(self._close_the_door(), self._loop).result()
        looks = int(self._seconds / LOOK_SECONDS)
        while self._num_requests and looks > 0 and not self._is_over.is_set():
            self._is_over.wait(LOOK_SECONDS)
            looks -= 1
        if num := self._num_requests:
            logger.warning(
                "Stopping: cutting %d requests off; SPEAKER_DRAIN_SECONDS is how long "
                "they may take.",
                num,
            )

    @property
    def _num_requests(self) -> int:
        return len(self._state.server.server_state.tasks)

    async def _close_the_door(self) -> None:
        server = self._state.server
        for listening in getattr(server, "servers", ()):  # none before it has started
            listening.close()
        for connection in list(server.server_state.connections):
            # An idle one is closed; another one once it is answered. WebSockets, which
            # have no such cycle, would be cut off.
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
