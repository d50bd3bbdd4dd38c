"""What tenants of one clip share, and what each has for itself."""

import asyncio
import json
import logging
from functools import partial

import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.audio_clips import sndfile_bytes
from tests.contract.test_other_models import glm, serve
from tests.speaking import by_websocket, data_url, wav
from tests.speech_server import Server, listening, running
from tests.two_tenants import ADMIN_KEY, AUDIO, VOICES, file_of, two_tenants
from tests.waiting import soon
from vllm_tts_cache import tenants

HEADER = "X-Speaker-Cache"


@pytest.fixture
def hosting(default_checkpoint, tmp_path, monkeypatch):
    return partial(two_tenants, default_checkpoint, tmp_path, monkeypatch)


@pytest.fixture
async def host(hosting):
    async with hosting() as host:
        host.them.pitch_hz = host.us.pitch_hz  # the same clip
        yield host


async def voice_of(side, name="Ann", **fields):
    answer = await side.register(name, side.clip(), **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["voice"]


async def status(side, name="Ann"):
    return (await side.client.get(f"{VOICES}/{name}/cache")).json()["cache_status"]


async def spoken(side, **fields):
    answer = await side.speak(**fields)
    assert answer.status_code == 200, answer.text
    return answer.headers[HEADER]


async def test_a_clip_of_two_tenants_is_encoded_once_and_stays_when_one_deletes(host):
    us, them = host.us, host.them
    for side in (us, them):
        await voice_of(side, ref_text="words")
    assert (await status(them), await spoken(us, voice="Ann")) == ("pending", "miss")
    assert (await status(them), await spoken(them, voice="Ann")) == ("ready", "hit")
    assert (await us.client.delete(f"{VOICES}/Ann")).status_code == 200
    assert await spoken(them, voice="Ann") == "hit"
    await voice_of(us, ref_text="words")
    assert await spoken(us, voice="Ann") == "hit"
    inline = {"ref_audio": data_url(pitch_hz=them.pitch_hz), "ref_text": "words"}
    assert await spoken(them, **inline) == "hit"
    assert set(host.server.encodes.values()) == {1}


async def test_a_prompt_that_is_lost_is_made_anew_for_its_own_tenant(host):
    us = host.us
    await voice_of(us, ref_text="words")
    await spoken(us, voice="Ann")
    store = host.server.service.store
    sha = store.find("Ann", "acme").record.audio_sha256

    def lose():
        for kind in store.files.artifacts(sha) - {"audio"}:
            store.files.remove(sha, [kind])
        host.server.speakers.delete([sha])

    wav_stream = {"stream_format": "audio", "response_format": "wav"}
    for how in ({}, {"response_format": "pcm", "stream": True}, wav_stream):
        host.server.engine.before_prefill.append(lose)
        answer = await us.speak(voice="Ann", **how)
        assert answer.status_code == 200 and len(answer.content) > 1_000, answer.text
    host.server.engine.before_prefill.append(lose)
    assert await by_websocket(host.server, key=us.key, voice="Ann") is None
    await us.client.post(f"{VOICES}/Ann/cache?force=true")


async def test_a_key_that_is_taken_away_and_one_that_is_given(host, monkeypatch):
    await voice_of(host.us)
    host.path.write_text(file_of(host.them))
    await soon(lambda: "acme" not in host.server.service.tenants.tenants)
    assert (await host.us.client.get(VOICES)).status_code == 401
    assert await host.them.names() == []
    host.path.write_text("{")
    await asyncio.sleep(2 * tenants.LOOK_SECONDS)
    assert await host.them.names() == []
    host.path.write_text(file_of(host.us))
    await soon(lambda: "acme" in host.server.service.tenants.tenants)
    assert await host.us.names() == ["Ann"]


@pytest.mark.parametrize("is_moved", [False, True])
async def test_a_websocket_says_no_more_when_its_key_is_taken_away(host, is_moved):
    """Moved to another tenant it spoke on with the first one's voices."""
    us, later = host.us, json.loads(file_of(host.them))
    if is_moved:
        later["tenants"][0]["keys"].append(us.key)
    await voice_of(us, ref_text="words")
    key = {"Authorization": f"Bearer {us.key}"}
    path = f"{AUDIO}/speech/stream"
    async with (
        listening(host.server.app) as port,
        connect(f"ws://127.0.0.1:{port}{path}", additional_headers=key) as socket,
    ):

        async def say(**message):
            await socket.send(json.dumps(message))

        async def told(kind):
            while True:
                message = await asyncio.wait_for(socket.recv(), 30)
                if isinstance(message, str) and kind in message:
                    return json.loads(message)

        await say(type="session.config", voice="Ann")
        await say(type="input.text", text="Hello.")
        await say(type="input.done")
        assert (await told("session.done"))["total_sentences"] == 1
        num_prompts = len(host.server.engine.prompts)
        host.path.write_text(json.dumps(later))
        await soon(lambda: "acme" not in host.server.service.tenants.tenants)
        await say(type="input.text", text="Hello.")
        await say(type="input.done")
        assert "API key" in (await told('"error"'))["message"]
        with pytest.raises(ConnectionClosed) as closed:
            await told("session.done")
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
        assert len(host.server.engine.prompts) == num_prompts


async def test_no_log_has_a_key(host, caplog):
    with caplog.at_level(logging.DEBUG):
        await voice_of(host.us)
        await host.us.speak(voice="Ann")
        await host.client("wrong-key-0123456789").get(VOICES)
        host.path.write_text(file_of(host.us, host.us))
        await asyncio.sleep(2 * tenants.LOOK_SECONDS)
    assert "is there twice" in caplog.text
    for key in (host.us.key, host.them.key, ADMIN_KEY, "wrong-key-0123456789"):
        assert key not in caplog.text


async def test_limits_are_of_each_tenant_and_are_409s(hosting):
    async with hosting(max_voices=1, max_audio_bytes=100_000) as host:
        us, them = host.us, host.them
        for side in (us, them):
            await voice_of(side)
        second = await us.register("Bea", us.clip())
        assert second.status_code == 409
        assert "max_voices" in second.json()["error"]["message"]
        noise = np.random.default_rng(0).uniform(-0.5, 0.5, 72_000)
        long = await us.register("Ann", sndfile_bytes(noise, 24_000, "WAV"))
        assert long.status_code == 409
        assert "max_audio_bytes" in long.json()["error"]["message"]
        shown = (await us.client.get(f"{AUDIO}/speaker_cache")).json()
        assert shown["limits"]["speakers"] == 1


async def test_a_tenant_takes_as_many_inline_places_as_it_may(hosting):
    async with hosting(max_inline=1) as host:
        us, them = host.us, host.them

        def inline(pitch_hz):
            return {"ref_audio": data_url(pitch_hz=pitch_hz), "ref_text": "words"}

        gate = host.server.encoders[0].gate
        gate.clear()
        first = asyncio.create_task(us.speak(**inline(310.0)))
        await soon(lambda: len(host.server.service.encodings.pending) > 0)
        refused = await us.speak(**inline(320.0))
        assert refused.status_code == 503 and "Retry-After" in refused.headers
        other = asyncio.create_task(them.speak(**inline(330.0)))
        await asyncio.sleep(0.1)
        gate.set()
        assert (await first).status_code == (await other).status_code == 200
        assert (await us.speak(ref_audio="data:,x", ref_text="words")).is_client_error
        assert (await us.speak(**inline(320.0))).status_code == 200


async def test_what_was_there_before_is_the_default_tenants(
    hosting, default_checkpoint, tmp_path, monkeypatch
):
    directory = tmp_path / "speakers"
    before = Server(default_checkpoint, directory, monkeypatch)
    async with running(before) as server:
        await server.register("Ann", wav(), ref_text="words")
        assert (await server.speak(voice="Ann")).headers[HEADER] == "miss"
    async with hosting() as host:
        us = host.us
        us.tenant = "default"
        host.path.write_text(file_of(us))
        us.client.headers["Authorization"] = f"Bearer {us.key}"
        await soon(lambda: "default" in host.server.service.tenants.tenants)
        await host.server.settled()
        assert await us.names() == ["Ann"] and await status(us) == "ready"
        assert await spoken(us, voice="Ann") == "hit"


async def test_the_hosts_own_models_speak_with_each_tenants_voice(hosting):
    async with hosting(make=glm) as host:
        serve(host.server, "glm_tts")
        for side in (host.us, host.them):
            await voice_of(side, ref_text=side.words)
        for side in (host.us, host.them):
            answer = await side.speak(voice="Ann")
            assert answer.status_code == 200, answer.text
            told = host.server.engine.prompts[-1]["mm_processor_kwargs"]
            assert told["prompt_text"] == side.words
        mine = (await host.us.client.get(f"{VOICES}/Ann")).json()["voice"]
        refused = await host.them.speak(voice=mine["id"])
        assert refused.status_code == 400 and "Unknown voice" in refused.text
