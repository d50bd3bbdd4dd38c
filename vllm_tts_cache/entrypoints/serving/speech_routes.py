"""The host's speech routes, with a bounded body and the speaker cache's header."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import model_validator
from starlette.background import BackgroundTasks
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm_omni.entrypoints.openai import api_server
from vllm_omni.entrypoints.openai.protocol.audio import (
    BatchSpeechRequest,
    OpenAICreateAudioGenerateRequest,
    OpenAICreateSpeechRequest,
)

from vllm_tts_cache.entrypoints.http import routing
from vllm_tts_cache.entrypoints.http.models import file_answers, refusals
from vllm_tts_cache.entrypoints.http.routing import calling_tenant, tenant_of
from vllm_tts_cache.entrypoints.serving import request_speaker
from vllm_tts_cache.entrypoints.serving.host_http import unless_client_leaves
from vllm_tts_cache.tenants import speaking_for

_SSE_ERROR = "event: speech.audio.error"
router = APIRouter(route_class=routing.GuardedRoute)

_JSON = [Depends(validate_json_request)]
_CLIENT_CLOSED_REQUEST = 499  # as proxies log it
_TEXT = "The keeper counts the ships at dusk."


async def after_first_chunk(response: StreamingResponse) -> Response:
    """Wait for the first chunk. Raises: What the stream raises before that chunk."""
    chunks: Any = response.body_iterator
    try:
        first = await anext(chunks, None)
    except BaseException:
        # The engine must not go on for a client that got an error or has left.
        await chunks.aclose()
        raise
    if isinstance(first, str) and first.startswith(_SSE_ERROR):
        await chunks.aclose()
        error = json.loads(first.split("data: ", 1)[1])["error"]
        return JSONResponse({"error": error}, status_code=int(error["code"]))
    response.body_iterator = _resumed(first, chunks)
    return response


async def _resumed(first: Any, chunks: Any) -> AsyncIterator[Any]:
    async with aclosing(chunks):
        if first is not None:
            yield first
        async for chunk in chunks:
            yield chunk


def example(example: dict[str, Any]) -> dict[str, Any]:
    """Document a body by an example; its fields are the host's."""
    return {"requestBody": {"content": {"application/json": {"example": example}}}}


class SpeechBatch(BatchSpeechRequest):
    """The host's batch; voices may be objects with an id, as OpenAI's client sends."""

    @model_validator(mode="before")
    @classmethod
    def _with_plain_voices(cls, given: Any) -> Any:
        given = request_speaker.with_plain_voice(given)
        if isinstance(given, dict) and isinstance(given.get("items"), list):
            items = [request_speaker.with_plain_voice(item) for item in given["items"]]
            return {**given, "items": items}
        return given


SPEECH: dict[str, Any] = {
    "dependencies": _JSON,
    "responses": file_answers(("audio/*", "text/event-stream"), 413, 500, 507),
    "response_class": Response,
    "openapi_extra": example({"input": _TEXT, "voice": "keeper"}),
}


@router.post("/v1/audio/speech", **SPEECH)
async def create_speech(
    request: OpenAICreateSpeechRequest, raw_request: Request
) -> Response:
    """As stock, plus a header; a stream answers when its first audio is there."""
    # Called here, as a dependency would cost FastAPI more time than the call.
    tenant = tenant_of(raw_request.state.caller)
    request_speaker.SPEAKING.set(request_speaker.Speaking())
    with speaking_for(tenant), request_speaker.observe_outcomes() as outcomes:
        response: Any = await api_server.create_speech(request, raw_request)
        if isinstance(response, StreamingResponse):
            response = await _begun(response, raw_request, outcomes)
        if outcomes.error is not None:
            answer = routing.speech_response(outcomes.error)
            # The host counts the requests that it works on; this one is over.
            answer.background = getattr(response, "background", None)
            response = answer
    return _with_header(response, outcomes)


@router.post(
    "/v1/audio/speech/batch",
    dependencies=_JSON,
    responses=refusals(413, 500, 507),
    openapi_extra=example({"items": [{"input": _TEXT}], "voice": "keeper"}),
)
async def create_speech_batch(request: SpeechBatch, raw_request: Request) -> Response:
    """As stock, plus the header: `miss` if any item's voice had to be encoded."""
    tenant = tenant_of(raw_request.state.caller)
    with speaking_for(tenant), request_speaker.observe_outcomes() as outcomes:
        response = await api_server.create_speech_batch(request, raw_request)
    return _with_header(response, outcomes)


@router.post(
    "/v1/audio/generate",
    dependencies=[*_JSON, Depends(calling_tenant)],
    responses=file_answers(("audio/*",), 413, 500),
    response_class=Response,
    openapi_extra=example({"input": "Rain on a tin roof."}),
)
async def create_audio_generate(
    request: OpenAICreateAudioGenerateRequest, raw_request: Request
) -> Any:
    """As stock, which names no voices; with tenants, for a tenant's key only."""
    return await api_server.create_audio_generate(request, raw_request)


async def _begun(
    response: StreamingResponse,
    raw_request: Request,
    outcomes: request_speaker.Outcomes,
) -> Any:
    """Wait for the first chunk; None if the client leaves before it comes.

    Raises: What the host's route raises for an engine that fails.
    """
    after_answer = response.background or BackgroundTasks()
    try:
        # The host notices a client that leaves only until a handler returns a stream.
        first = after_first_chunk(response)
        begun: Any = await unless_client_leaves(raw_request, first)
    except Exception as exc:
        if outcomes.error is not None:
            return response  # the route answers the error instead
        await after_answer()
        if isinstance(exc, (EngineGenerateError, EngineDeadError)):
            raise
        raise HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR, str(exc)) from exc
    if begun is None:
        await after_answer()
    elif begun is not response:
        begun.background = after_answer
    return begun


def _with_header(response: Any, outcomes: request_speaker.Outcomes) -> Response:
    # The host answers None to a client that has left.
    if response is None:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    response.headers[request_speaker.CACHE_HEADER] = outcomes.header()
    return response
