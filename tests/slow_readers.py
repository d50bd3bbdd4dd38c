"""Clients that take the beginning of a large answer, and nothing more."""

import httpx
import pytest

from tests.speech_server import listening
from tests.waiting import soon

LARGE = bytes(40 * 1024 * 1024)  # more than sockets hold


async def loses_its_place(server, path, places):
    """A client that reads the first bytes and then nothing more."""
    num_places = places._num_free
    async with (
        listening(server.app) as port,
        httpx.AsyncClient() as client,
        client.stream("GET", f"http://127.0.0.1:{port}{path}") as answer,
    ):
        chunks = answer.aiter_raw(1024)
        await anext(chunks)
        assert places._num_free == num_places - 1
        await soon(lambda: places._num_free == num_places)
        with pytest.raises(httpx.TransportError):
            async for _ in chunks:
                pass
