"""What must have come before an answer counts as begun."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

_SSE_ERROR = "event: speech.audio.error"


@with_cancellation
async def first_chunk_or_disconnect(
    response: StreamingResponse, raw_request: Request
) -> Response:
    """As `after_first_chunk`; ends with the client's connection, answering None.

    The host's own watch for disconnects ends where a handler has returned a stream.
    """
    del raw_request
    return await after_first_chunk(response)


async def after_first_chunk(response: StreamingResponse) -> Response:
    """Wait for the first chunk; what fails before it is an error with a status.

    Raises: Whatever the stream raises before its first chunk.
    """
    chunks: Any = response.body_iterator
    try:
        first = await anext(chunks, None)
    except BaseException:
        # The engine must not go on for a client that got an error or has left.
        await chunks.aclose()
        raise
    if isinstance(first, str) and first.startswith(_SSE_ERROR):
        await chunks.aclose()
        return _error_of_event(first)
    response.body_iterator = _resumed(first, chunks)
    return response


async def _resumed(first: Any, chunks: Any) -> AsyncIterator[Any]:
    async with aclosing(chunks):
        if first is not None:
            yield first
        async for chunk in chunks:
            yield chunk


def _error_of_event(event: str) -> JSONResponse:
    data = event.split("data: ", 1)[1]
    error = json.loads(data)["error"]
    return JSONResponse({"error": error}, status_code=int(error["code"]))
