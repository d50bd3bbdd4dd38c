import asyncio
import gc
import json
from typing import Any

import pytest
from fastapi.responses import JSONResponse, StreamingResponse

from vllm_tts_cache.entrypoints.serving.speech_routes import after_first_chunk
from vllm_tts_cache.errors import EncodeError


class Stream:
    """A generator behind a response; knows how far it came and if it was closed."""

    def __init__(self, *items):
        self.items = items
        self.num_given = 0
        self.is_closed = False
        self.response = StreamingResponse(self.run(), media_type="audio/wav")

    async def run(self):
        try:
            for item in self.items:
                self.num_given += 1
                yield item
        finally:
            self.is_closed = True


def chunks_of(response) -> Any:
    return response.body_iterator


async def test_a_stream_arrives_whole_with_its_headers():
    stream = Stream(b"one", b"two", b"three")
    response = await after_first_chunk(stream.response)
    assert isinstance(response, StreamingResponse)
    assert stream.num_given == 1
    assert response.media_type == "audio/wav"
    assert [chunk async for chunk in chunks_of(response)] == [b"one", b"two", b"three"]
    assert stream.is_closed


class Chunks:
    """Chunks that are no generator, so that nothing but `aclose` ends them."""

    def __init__(self, error):
        self.error = error
        self.is_closed = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        raise self.error

    async def aclose(self):
        self.is_closed = True


@pytest.mark.parametrize("error", [EncodeError("no"), asyncio.CancelledError()])
async def test_chunks_of_any_kind_are_closed_when_the_first_does_not_come(error):
    chunks = Chunks(error)
    with pytest.raises(type(error)):
        await after_first_chunk(StreamingResponse(chunks))
    assert chunks.is_closed


async def test_a_client_that_leaves_later_closes_the_stream():
    stream = Stream(b"one", b"two", b"three")
    response = await after_first_chunk(stream.response)
    assert await anext(chunks_of(response)) == b"one"
    assert not stream.is_closed
    await chunks_of(response).aclose()
    assert stream.is_closed
    assert stream.num_given == 1


async def test_a_response_that_nobody_reads_closes_its_stream():
    """The server drops it without a word; Python then tells the loop to close it."""
    stream = Stream(b"one", b"two")
    response = await after_first_chunk(stream.response)
    del response
    del stream.response
    gc.collect()
    await asyncio.sleep(0.01)
    assert stream.is_closed


@pytest.mark.parametrize("code", [400, 500, 503])
async def test_an_error_event_that_comes_first_becomes_json_with_its_status(code):
    error = {"message": "no", "type": "X", "param": None, "code": code}
    event = f"event: speech.audio.error\ndata: {json.dumps({'error': error})}\n\n"
    stream = Stream(event, "event: other\n\n")
    response = await after_first_chunk(stream.response)
    assert isinstance(response, JSONResponse)
    assert response.status_code == code
    assert json.loads(bytes(response.body)) == {"error": error}
    assert stream.is_closed
    assert stream.num_given == 1
