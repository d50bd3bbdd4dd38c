"""Clips and previews are sent to so many at once, and to nobody for ever."""

import asyncio

import httpx
import pytest

from tests.contract.test_speech import wav
from tests.slow_readers import LARGE, loses_its_place
from tests.speech_server import Server, listening, running
from tests.waiting import soon
from vllm_tts_cache.entrypoints import sending
from vllm_tts_cache.entrypoints.service import MAX_SOUNDS

ANN = "/v1/audio/voices/Ann"
WAYS = (("GET", "audio"), ("GET", "preview"), ("POST", "preview"))
each_way = pytest.mark.parametrize(
    ("method", "what"), WAYS, ids=("audio", "kept", "made")
)


@pytest.fixture
async def server(default_checkpoint, tmp_path, monkeypatch):
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        done = await server.register("Ann", wav())
        assert done.status_code == 200, done.text
        spoken = await server.client.post(f"{ANN}/preview")
        assert spoken.status_code == 200, spoken.text
        yield server


@pytest.fixture
def is_large(server, monkeypatch):
    async def kept(*_):
        return LARGE

    monkeypatch.setattr(server.service.previews, "kept", kept)
    store = server.service.store
    monkeypatch.setattr(store, "audio_for_client", lambda _: (LARGE, "audio/wav"))


@each_way
async def test_it_says_how_long_it_is_and_gives_its_place_back(server, method, what):
    answer = await server.client.request(method, f"{ANN}/{what}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["cache-control"] == "no-store"
    assert "content-disposition" not in answer.headers
    missing = await server.client.request(method, f"/v1/audio/voices/nobody/{what}")
    assert missing.status_code == 404
    assert server.service.sounds._num_free == MAX_SOUNDS


@each_way
async def test_one_more_than_may_be_sent_at_once_is_told_to_wait(server, method, what):
    places = [server.service.sounds.enter() for _ in range(MAX_SOUNDS)]
    answer = await server.client.request(method, f"{ANN}/{what}")
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) > 0
    assert "too many clips are being sent" in answer.json()["error"]["message"]
    places.pop()()
    assert (await server.client.request(method, f"{ANN}/{what}")).status_code == 200


@each_way
async def test_a_client_that_reads_nothing_more_loses_its_place(
    server, is_large, monkeypatch, method, what
):
    """And the server does not hold all of it in a buffer of the socket's."""
    monkeypatch.setattr(sending, "SEND_SECONDS", 1.0)
    await loses_its_place(server, f"{ANN}/{what}", server.service.sounds, method)


@each_way
async def test_a_client_that_leaves_gives_its_place_back(
    server, is_large, method, what
):
    sounds = server.service.sounds
    async with listening(server.app) as port:
        url = f"http://127.0.0.1:{port}{ANN}/{what}"
        async with (
            httpx.AsyncClient() as client,
            client.stream(method, url) as answer,
        ):
            chunks = answer.aiter_raw(1024)  # collected, it would close the answer
            await anext(chunks)
            await asyncio.sleep(0.1)
            assert sounds._num_free == MAX_SOUNDS - 1
        await soon(lambda: sounds._num_free == MAX_SOUNDS)
