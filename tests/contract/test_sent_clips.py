"""Files of voices are sent to so many at once, in parts, and to nobody for ever."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect

from tests.speaking import wav
from tests.speech_server import listening
from tests.waiting import soon
from vllm_tts_cache.entrypoints.http import clips, routing
from vllm_tts_cache.entrypoints.speakers.executors import Slots
from vllm_tts_cache.entrypoints.speakers.service import MAX_BUNDLES, MAX_SOUNDS
from vllm_tts_cache.store.bundle_format import read

ANN = "/v1/audio/voices/Ann"
CLIP = f"{ANN}/audio"
LARGE = bytes(40 * 1024 * 1024)  # more than sockets hold


@pytest.fixture
async def server(server):
    done = await server.register("Ann", wav())
    assert done.status_code == 200, done.text
    return server


@pytest.fixture
def is_large(server, monkeypatch):
    store, bundles = server.service.store, server.service.bundles
    record = store.find("Ann").record
    monkeypatch.setattr(store, "audio_for_client", lambda _: (LARGE, "audio/wav"))
    monkeypatch.setattr(bundles, "export", lambda *_: (record, LARGE))


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


async def test_it_says_how_long_it_is_and_gives_its_place_back(server):
    answer = await server.client.get(CLIP)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["cache-control"] == "no-store"
    assert "content-disposition" not in answer.headers
    missing = await server.client.get("/v1/audio/voices/nobody/audio")
    assert missing.status_code == 404
    assert server.service.sounds._num_free == MAX_SOUNDS


async def test_one_more_than_may_be_sent_at_once_is_told_to_wait(server):
    places = [server.service.sounds.enter() for _ in range(MAX_SOUNDS)]
    answer = await server.client.get(CLIP)
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) > 0
    assert "too many clips are being sent" in answer.json()["error"]["message"]
    places.pop()()
    assert (await server.client.get(CLIP)).status_code == 200


@pytest.mark.parametrize("path", [CLIP, f"{ANN}/bundle"])
async def test_who_reads_no_more_loses_its_place(server, is_large, monkeypatch, path):
    """And the server does not hold all of it in a buffer of the socket's."""
    monkeypatch.setattr(routing, "PATIENCE_SECONDS", 1.0)
    service = server.service
    await loses_its_place(
        server, path, service.sounds if path == CLIP else service.exports
    )


async def test_a_client_that_reads_below_the_rate_loses_its_place(monkeypatch):
    """A little of each piece, in time for each, held a place for 20 minutes."""
    monkeypatch.setattr(routing, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(routing, "MIN_BYTES_PER_SECOND", 1024**3)
    places, sent = Slots("full", 1), []
    answer = clips.PlacedFile(LARGE, places.enter(), "audio/wav", {})

    async def send(message):
        await asyncio.sleep(0.1)
        sent.append(len(message.get("body", b"")))

    async def receive() -> Any:
        await asyncio.Event().wait()

    with pytest.raises((OSError, ClientDisconnect)):
        await answer({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    assert places._num_free == 1
    assert 0 < sum(sent) < len(LARGE)


async def test_a_client_that_leaves_gives_its_place_back(server, is_large):
    sounds = server.service.sounds
    async with listening(server.app) as port:
        url = f"http://127.0.0.1:{port}{CLIP}"
        async with httpx.AsyncClient() as client, client.stream("GET", url) as answer:
            chunks = answer.aiter_raw(1024)  # collected, it would close the answer
            await anext(chunks)
            await asyncio.sleep(0.1)
            assert sounds._num_free == MAX_SOUNDS - 1
        await soon(lambda: sounds._num_free == MAX_SOUNDS)


async def test_a_bundle_says_how_long_it_is(server):
    answer = await server.client.get(f"{ANN}/bundle")
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["content-disposition"].endswith("''Ann.voice")
    assert read(answer.content, b"").voice.name == "Ann"
    assert server.service.exports._num_free == MAX_BUNDLES


async def whole_file(server):
    """A file, its name (`ETag`), and what asks for it in another way."""
    whole = await server.client.get(CLIP)
    assert whole.headers["accept-ranges"] == "bytes"

    async def ask(method="GET", **headers):
        return await server.client.request(method, CLIP, headers=headers)

    return whole.content, whole.headers["etag"], ask


async def test_a_range_of_bytes_is_a_206_that_says_which(server):
    data, etag, ask = await whole_file(server)
    last = len(data) - 1
    for asked, begin, end in (
        ("bytes=0-1", 0, 1),  # as players that want ranges ask first
        ("bytes=7-", 7, last),
        ("Bytes=-10", last - 9, last),
        (f"bytes=-{2 * len(data)}", 0, last),
        (f"bytes={last}-{10**17}", last, last),
    ):
        for others in ({}, {"If-Range": etag}):
            part = await ask(Range=asked, **others)
            assert part.status_code == 206, part.text
            assert part.content == data[begin : end + 1]
            assert part.headers["content-range"] == f"bytes {begin}-{end}/{len(data)}"
            assert part.headers["content-length"] == str(len(part.content))
            assert part.headers["etag"] == etag
    assert server.service.sounds._num_free == MAX_SOUNDS


async def test_a_range_that_is_none_or_of_another_file_is_the_whole_file(server):
    data, _, ask = await whole_file(server)
    for headers in (
        {"Range": "bytes=-"},
        {"Range": "bytes=5-1"},
        {"Range": "bytes=0-1,3-4"},
        {"Range": "bytes=\u0665-"},
        {"Range": f"bytes=0-{'9' * 4000}"},
        {"Range": "seconds=0-1"},
        {"Range": "bytes=0-1", "If-Range": '"another"'},
    ):
        sent: Any = {name: value.encode() for name, value in headers.items()}
        whole = await ask(**sent)
        assert (whole.status_code, whole.content) == (200, data)
        assert "content-range" not in whole.headers


async def test_a_range_behind_the_end_is_a_416_with_the_length(server):
    data, _, ask = await whole_file(server)
    for asked in (f"bytes={len(data)}-", "bytes=-0"):
        refused = await ask(Range=asked)
        assert refused.status_code == 416
        assert refused.headers["content-range"] == f"bytes */{len(data)}"
        assert f"the file has {len(data)}" in refused.json()["error"]["message"]
    assert server.service.sounds._num_free == MAX_SOUNDS


async def test_a_head_is_the_headers_alone(server):
    data, etag, _ = await whole_file(server)
    async with listening(server.app) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}{CLIP}"
        whole, head = await client.get(url), await client.head(url)
        nobody = await client.head(url.replace("Ann", "nobody"))
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(data))
    assert head.headers["etag"] == etag
    for each in (whole, head):
        each.headers.pop("date")
    assert head.headers == whole.headers
    assert nobody.status_code == 404
    assert server.service.sounds._num_free == MAX_SOUNDS


async def test_another_clip_of_a_voice_has_another_name(server):
    _, before, ask = await whole_file(server)
    await server.register("Ann", wav(seconds=2.5))
    changed = await ask(Range="bytes=0-1", **{"If-Range": before})
    assert changed.status_code == 200 and changed.headers["etag"] != before
