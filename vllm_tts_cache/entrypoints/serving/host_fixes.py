"""Fixes of the host around our calls and requests, and limits of its own routes.

`attach.PATCHES` has their reasons. vLLM-Omni serves all of its routes for every model:
to complete, to chat, to put the engine to sleep, to make pictures. None of them knows
tenants, and the chat route hands on to the talker what a client sends as
``additional_information``, where the talker expects what its adapter has built.
"""

import asyncio
import logging
import re
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import wraps
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from vllm import SamplingParams
from vllm_omni.engine.messages import CollectiveRPCResultMessage, ErrorMessage

from vllm_tts_cache.entrypoints.serving.request_speaker import check_sampling
from vllm_tts_cache.entrypoints.serving.serving import CachedServingSpeech
from vllm_tts_cache.entrypoints.speakers.ensure import SpeakerEncodings
from vllm_tts_cache.errors import InvalidSpeakerError, TTSCacheError
from vllm_tts_cache.logs import ThrottledLog, logger
from vllm_tts_cache.speaker import rpc_client as rpc
from vllm_tts_cache.speaker.family import families
from vllm_tts_cache.speaker.reference import with_keyed_salt
from vllm_tts_cache.tenants import is_speaking

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
    calls: Sequence["asyncio.Task[Any]"], *, seconds: float, is_one_enough: bool
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


# What may be read of the host where there are tenants: the state of the server, and
# the WebSocket, which needs a tenant's key. docs/tenants.md has the list.
OPEN_PATHS = frozenset(
    {"/docs", "/docs/oauth2-redirect", "/load", "/metrics", "/openapi.json", "/ping"}
    | {"/redoc", "/v1/audio/speech/stream", "/v1/models", "/version"}
)

INFORMATION = "additional_information"
# Fields of it that the host's chat route sets itself.
_CHAT_FIELDS = frozenset({"instruction", "language", "speaker"})
# The id names files and shared memory: with a longer one, or a path, a request hangs.
_REQUEST_ID = re.compile(r"[^/\0]{1,200}")
# Some change how a talker's sampler draws all of a step. The others name ids that the
# logits of codes have not, or forbid all that they have, which ends the engine.
_OF_TEXT = ["allowed_token_ids", "bad_words", "frequency_penalty", "logprob_token_ids"]
_OF_TEXT += ["logprobs", "presence_penalty", "prompt_logprobs", "repetition_penalty"]
_OF_TEXT += ["logit_bias", "min_tokens", "stop_token_ids", "structured_outputs"]

router = APIRouter()

# Bytes of a request's line and headers, of its trailers, or between parts of its body.
MAX_HEAD_BYTES = 64 * 1024


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's protocol, whose parser has no limit, with one for lines and headers."""

    _num_parsed = 0  # bytes since the last complete head or the last part of a body

    def data_received(self, data: bytes) -> None:
        """Parse data; answer 400 and close if a line or a header has too many bytes."""
        self._num_parsed += len(data)
        super().data_received(data)
        if self._num_parsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's line or its headers are too long.")

    def on_headers_complete(self) -> None:
        """Count the bytes of the next head from 0."""
        self._num_parsed = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count the bytes behind this part of the body from 0."""
        self._num_parsed = 0
        super().on_body(body)


class ForeignRequestError(ValueError):
    """A route of the host sends what only an adapter may (400, as the host maps it)."""


def guarding(serve_http: Method, *, has_tenants: bool) -> Method:
    """Make the host's ``serve_http`` bound heads, and close or guard its own routes."""

    async def serve(app: Any, *args: Any, **options: Any) -> Any:
        if has_tenants:
            close_host_routes(app.router)
        speech = app.state.openai_serving_speech
        if isinstance(speech, CachedServingSpeech) and speech.cached_adapter:
            encodings = speech.speakers.encodings
            believe_adapters_alone(app.state.engine_client, encodings)
        return await serve_http(app, *args, **{"http": BoundedHeads, **options})

    return serve


def close_host_routes(router: Any) -> None:
    """Remove all routes of an application but ours and `OPEN_PATHS`: they are 404."""
    left = [route for route in router.routes if _is_open(route)]
    message = "With tenants, %d routes of vLLM-Omni that know none answer 404."
    logger.info(message, len(router.routes) - len(left))
    router.routes[:] = left


def _is_open(route: Any) -> bool:
    endpoint = getattr(route, "endpoint", None)
    is_ours = getattr(endpoint, "__module__", "").startswith("vllm_tts_cache.")
    is_read = (getattr(route, "methods", None) or set()) <= {"GET", "HEAD"}
    return is_ours or (is_read and getattr(route, "path", None) in OPEN_PATHS)


def believe_adapters_alone(engine: Any, encodings: SpeakerEncodings) -> None:
    """Make an engine client refuse prompts that set what only an adapter may set.

    A salt that a client sets is another than any of an adapter's, which are keyed. The
    engine client's ``generate`` is replaced.
    """
    host = engine.generate
    usual = (SamplingParams(), *engine.default_sampling_params_list)

    def generate(
        prompt: Any, sampling_params: Any = None, request_id: str = "", **named: Any
    ) -> Any:
        if is_speaking():
            prompt = with_keyed_salt(prompt, encodings.secret)
        else:
            if not _REQUEST_ID.fullmatch(request_id or "none"):
                raise ForeignRequestError("request_id: it is too long, or has / or NUL")
            for params in [sampling_params, *(named.get("sampling_params_list") or ())]:
                _check_params(params, usual)
            if isinstance(prompt, AsyncGenerator):
                prompt = _checked_all(prompt)
            for each in prompt if isinstance(prompt, list) else [prompt]:
                _check_prompt(each)
        return host(prompt, sampling_params, request_id, **named)

    engine.generate = generate


async def _checked_all(inputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    async for each in inputs:
        _check_prompt(each.prompt)
        yield each


def _check_params(params: Any, usual: Sequence[Any]) -> None:
    """Check the sampling against ``usual`` ones. Raises: ForeignRequestError."""
    for name in _OF_TEXT:
        value = getattr(params, name, None)
        allowed = [getattr(each, name, None) for each in usual]
        if value not in (None, [], {}, *allowed):  # 0 of logprobs is not none
            said = f"{str(value)[:99]!r} is for text, and this model draws codes"
            raise ForeignRequestError(f"{name}: {said}; leave it out")
    if isinstance(params, SamplingParams):
        try:  # chat hands on any types; a wrong one ends a thread of the engine
            msgspec.convert(msgspec.to_builtins(params), SamplingParams)
            check_sampling({"tts_local_seed": params.seed})
            check_sampling(params.extra_args)
        except (InvalidSpeakerError, TypeError, ValueError) as exc:
            reason = f"sampling or vllm_xargs: {getattr(exc, 'reason', exc)}"
            raise ForeignRequestError(reason) from exc


def _check_prompt(prompt: Any) -> None:
    """Refuse fields that only an adapter may set. Raises: ForeignRequestError."""
    information = prompt.get(INFORMATION) if isinstance(prompt, dict) else None
    if not isinstance(information, Mapping):
        return
    foreign = []
    for name, value in information.items():
        texts = value if isinstance(value, list) else [value]
        if name not in _CHAT_FIELDS or not all(isinstance(text, str) for text in texts):
            foreign.append(str(name))
    if foreign:
        raise ForeignRequestError(
            f"{INFORMATION}: {', '.join(sorted(foreign))[:200]} cannot be set by a "
            "request. Send the text and the voice to POST /v1/audio/speech."
        )


@router.get("/health", include_in_schema=False)
async def health(raw_request: Request) -> Any:
    """Answer as the host does; 503 with a reason until workers' encoders are known.

    Encoders of workers with another store than this process's are never accepted.
    """
    from vllm_omni.entrypoints.openai import api_server

    answer = await api_server.health(raw_request)
    handler = getattr(raw_request.app.state, "openai_serving_speech", None)
    if answer.status_code != HTTPStatus.OK or not (
        isinstance(handler, CachedServingSpeech)
        and not handler.speakers.encodings.knows_encoders
    ):
        return answer
    reason = "the workers have not said yet how they encode voices; see the log"
    content = {"status": "unhealthy", "reason": reason}
    return JSONResponse(content, HTTPStatus.SERVICE_UNAVAILABLE)
