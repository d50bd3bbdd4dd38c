"""Restricts what the host's own routes may do beside ours.

vLLM-Omni serves all of its routes for every model: to complete, to chat, to put the
engine to sleep, to make pictures. None of them knows tenants, and the chat route hands
on to the talker what a client sends as ``additional_information``, where the talker
expects what its adapter has built.
"""

import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from vllm import SamplingParams

from vllm_tts_cache.entrypoints.serving.request_speaker import check_sampling
from vllm_tts_cache.entrypoints.serving.serving import CachedServingSpeech
from vllm_tts_cache.entrypoints.speakers.ensure import SpeakerEncodings
from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.logs import logger
from vllm_tts_cache.speaker.reference import with_keyed_salt
from vllm_tts_cache.tenants import is_speaking

Serve = Callable[..., Coroutine[Any, Any, Any]]

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


def guarding(serve_http: Serve, *, has_tenants: bool) -> Serve:
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
