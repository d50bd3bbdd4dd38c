"""The block of docs/fleet.md in a real nginx: WebSockets, streams and large uploads."""

import asyncio
import json

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin

from tests.audio_clips import sndfile_bytes, voiced
from tests.front import in_front_of
from tests.speech_server import Server, listening, running

STREAM = "/v1/audio/speech/stream"


async def test_a_websocket_speaks_through_it(default_checkpoint, tmp_path, monkeypatch):
    made = Server(default_checkpoint, tmp_path / "speakers", monkeypatch)
    async with running(made) as server, listening(server.app) as port:
        await server.register("Ann", sndfile_bytes(voiced(), 24_000))
        with in_front_of([port]) as url:
            stream = url.replace("http", "ws") + STREAM
            # As the page's own, which nginx serves at its port.
            async with connect(stream, origin=Origin(url)) as socket:
                for message in (
                    {"type": "session.config", "voice": "Ann"},
                    {"type": "input.text", "text": "Hello."},
                    {"type": "input.done"},
                ):
                    await socket.send(json.dumps(message))
                heard = bytearray()
                while isinstance(said := await socket.recv(), bytes) or (
                    json.loads(said)["type"] != "session.done"
                ):
                    heard += said if isinstance(said, bytes) else b""
                assert len(heard) > 1_000
            with pytest.raises(InvalidStatus) as refused:
                await connect(stream, origin=Origin("http://other.example"))
            assert refused.value.response.status_code == 403


class Upstream:
    """Answers in two pieces, the second one when the first has been read."""

    def __init__(self):
        self.was_heard = asyncio.Event()
        self.headers: list[dict[bytes, bytes]] = []
        self.num_bytes = 0

    async def __call__(self, scope, receive, send):
        self.headers.append(dict(scope["headers"]))
        has_more = True
        while has_more:
            message = await receive()
            self.num_bytes += len(message["body"])
            has_more = message["more_body"]
        kind = [(b"content-type", b"text/event-stream")]
        start = {"type": "http.response.start", "status": 200, "headers": kind}
        await send(start)
        body = {"type": "http.response.body", "body": b"data: 1\n\n"}
        await send({**body, "more_body": True})
        await asyncio.wait_for(self.was_heard.wait(), 30)
        await send(body)


async def test_a_stream_is_passed_on_as_it_comes_and_an_upload_is_taken_whole():
    upstream = Upstream()
    async with listening(upstream) as port, httpx.AsyncClient(timeout=30) as client:
        with in_front_of([port]) as url:
            # A bundle has up to 65 MiB, see docs/http-api.md.
            sent = bytes(65 * 1024**2)
            async with client.stream("POST", url, content=sent) as answer:
                async for piece in answer.aiter_raw():
                    assert piece == b"data: 1\n\n"
                    upstream.was_heard.set()
    assert upstream.num_bytes == len(sent)
    [headers] = upstream.headers
    assert headers[b"host"].decode() == url.removeprefix("http://")
    assert b"connection" not in headers and b"upgrade" not in headers
