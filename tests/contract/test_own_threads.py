"""What clients have others wait for fills no threads that those need.

Twelve names that no name server answered held up all others for 14 s on the host's
event loop. On asyncio's own they filled its default pool: six threads on two cores,
which everybody's warm requests waited for.
"""

import asyncio
import socket
import threading

import pytest

from tests.default_pool import filled_default_pool
from tests.fault.test_clients_that_leave import leave, plainly
from tests.speaking import data_url, wav
from tests.speech_server import Server, listening, running
from tests.waiting import soon
from tests.web import serving
from vllm_tts_cache.entrypoints.serving.fetching import NUM_NAME_THREADS
from vllm_tts_cache.speaker.family import families

AT_ONCE = 16  # URLs that are fetched, by default
DEAD = ".invalid"


@pytest.fixture
def looked_up(monkeypatch):
    """Dead names that are looked up; each takes until the test is over."""
    gate, names, getaddrinfo = threading.Event(), [], socket.getaddrinfo

    def held(host, *args, **kwargs):
        if str(host).endswith(DEAD):
            names.append(host)
            gate.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")
        return getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", held)
    yield names
    gate.set()


async def warm(server):
    """Have a voice and a data URL that need nothing more; returns how to ask."""
    assert (await server.register("Ann", wav(), ref_text="words")).is_success
    inline = {"ref_audio": data_url(pitch_hz=300), "x_vector_only_mode": True}
    asked = ({"voice": "Ann"}, inline, {"voice": "Ann", "input": "Long. " * 1000})
    for fields in asked:
        assert (await server.speak(**fields)).status_code == 200
    return asked


async def are_answered(server, asked):
    for fields in asked:
        answer = await asyncio.wait_for(server.speak(**fields), 60)
        cache = answer.headers["X-Speaker-Cache"]
        assert (answer.status_code, cache) == (200, "hit"), answer.text


def url_at(host):
    return f"http://{host}{DEAD}/clip.wav"


async def test_warm_requests_need_no_thread_of_the_default_pool(server):
    asked = await warm(server)
    async with filled_default_pool():
        await are_answered(server, asked)


async def test_names_that_nobody_answers_hold_up_nothing_but_names(server, looked_up):
    asked = await warm(server)
    names = server.handler.fetch_connection._names
    async with listening(server.app) as port:
        for num_left in (AT_ONCE, 2 * AT_ONCE):
            urls = [url_at(f"{num_left}-{number}") for number in range(AT_ONCE)]
            clients = [await plainly(port, url) for url in urls]
            await soon(lambda expected=num_left: names._num_pending == expected)
            await leave(clients)
            await soon(lambda: len(server.service.inline._fetches) == 0)
    assert len(looked_up) == NUM_NAME_THREADS
    await are_answered(server, asked)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 60) == "free"
    # No more of those that have left are kept than may be fetched.
    one_more = server.speak(ref_audio=url_at("one-more"), x_vector_only_mode=True)
    refused = await asyncio.wait_for(one_more, 60)
    assert refused.status_code == 503, refused.text
    assert int(refused.headers["Retry-After"]) > 0


@pytest.mark.parametrize("is_diffusion", [False, True])
async def test_every_model_fetches_anew_by_that_connection_alone(
    default_checkpoint, tiny, tmp_path, monkeypatch, is_diffusion
):
    which, checkpoint = {}, default_checkpoint
    if is_diffusion:
        family = next(family for family in families() if family.pipelines)
        which, checkpoint = {"family": family}, tiny(family)
    cache = tmp_path / "media"
    monkeypatch.setenv("VLLM_MEDIA_CACHE", str(cache))
    monkeypatch.setenv("SPEAKER_CACHE_FETCH_NETWORKS", "127.0.0.0/8")
    made = Server(checkpoint, tmp_path / "speakers", monkeypatch, **which)
    async with running(made) as server:
        with serving() as web:
            for pitch_hz in (150, 260):  # another person's clip by then
                web.answers["GET", "/c.wav"] = 200, {}, wav(pitch_hz=pitch_hz)
                fields = {"ref_audio": f"{web.url}/c.wav", "ref_text": "Hello."}
                assert (await server.speak(**fields)).status_code == 200
        assert set(server.encodes.values()) == {2}
        assert list(cache.iterdir()) == []
