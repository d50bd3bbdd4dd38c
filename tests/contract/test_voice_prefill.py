"""Whether voices are prefilled for a decoder: where it keeps states of them only."""

from typing import Any

import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes, voiced
from tests.speech_server import Server, running
from tests.waiting import soon
from vllm_tts_cache.entrypoints import kv_warming
from vllm_tts_cache.entrypoints.kv_warming import MAX_AGAIN
from vllm_tts_cache.speaker.ref import SpeakerRef


@pytest.fixture
def start(default_checkpoint, tmp_path, monkeypatch):
    """Makes servers that have their engine for themselves, one after the other."""
    monkeypatch.setattr(kv_warming, "LOOK_SECONDS", 0.001)

    def start():
        server = Server(default_checkpoint, tmp_path, monkeypatch)
        engine: Any = server.engine
        engine.engine._client_config = {}
        engine._paused = engine._sleeping_tags = engine.errored = False
        engine.request_states = {}
        return running(server)

    return start


@pytest.fixture
async def server(start):
    async with start() as server:
        yield server


async def register(server, name, pitch_hz):
    samples = (voiced(pitch_hz=pitch_hz) * 32767).astype(np.int16)
    clip = sndfile_bytes(samples, 24_000, "WAV")
    await server.register(name, clip, ref_text="words")


async def precompute(server, name, pitch_hz):
    await register(server, name, pitch_hz)
    answer = await server.client.post(f"/v1/audio/voices/{name}/cache")
    assert answer.status_code == 200


async def shown(server):
    return (await server.client.get("/v1/audio/speaker_cache")).json().get("kv_warming")


def num_asked(server):
    return server.engine.calls.count("tts_cache_decoder_stats")


async def test_a_decoder_that_keeps_states_is_asked_once(server):
    for number, name in enumerate(("Ann", "Bob")):
        await precompute(server, name, 220 + number)
        await soon(lambda: len(server.engine.prompts) == number + 1)  # noqa: B023
    assert num_asked(server) == 1
    assert (await shown(server))["failed"] == 0


async def test_where_it_keeps_none_nothing_is_prefilled_and_nothing_is_shown(server):
    """It replays CUDA graphs, or has no chunks: the host's first chunk stays."""
    for worker in server.engine.workers:
        del worker.model_runner.model.tts_cache_decoder_states
    await precompute(server, "Ann", 220)
    await soon(lambda: num_asked(server) == 1)
    assert await shown(server) is None
    num_before = num_asked(server)  # showing asks as well
    await precompute(server, "Bob", 330)
    assert server.engine.prompts == []
    assert num_asked(server) == num_before


async def test_a_voice_whose_transcript_was_changed_is_prefilled_anew(server):
    """Its clip is the same, and what was computed with the other text is deleted."""
    await precompute(server, "Ann", 220)
    await soon(lambda: server.service.kv_warming.stats()["warmed"] == 1)
    given = {"ref_text": "More"}
    answer = await server.client.patch("/v1/audio/voices/Ann", json=given)
    assert answer.status_code == 200
    await soon(lambda: server.service.kv_warming.stats()["warmed"] == 2)
    spoken = [prompt["additional_information"] for prompt in server.engine.prompts]
    assert [info["ref_text"] for info in spoken] == [["words"], ["More"]]


async def test_a_voice_that_shares_its_clip_is_prefilled_although_the_other_one_goes(
    server,
):
    server.engine.request_states = {"speech": object()}
    for name in ("Ann", "Bob"):
        await precompute(server, name, 220)
    assert (await server.client.delete("/v1/audio/voices/Ann")).status_code == 200
    # Whatever it is called when its turn comes.
    renamed = await server.client.patch("/v1/audio/voices/Bob", json={"name": "Cleo"})
    assert renamed.status_code == 200
    server.engine.request_states = {}
    assert await prefilled(server, 1) == ["Cleo"]
    await soon(lambda: server.service.kv_warming.stats()["warmed"] == 1)


async def names_of(server):
    """Audio -> the name of its voice."""
    voices = (await server.client.get("/v1/audio/voices")).json()["uploaded_voices"]
    found = [server.service.store.find(voice["name"]) for voice in voices]
    return {each.record.audio_sha256: each.record.name for each in found if each}


async def prefilled(server, number):
    """Whose voices were prefilled, in turn, once there are so many."""
    await soon(lambda: len(server.engine.prompts) == number)
    names = await names_of(server)
    infos = (prompt["additional_information"] for prompt in server.engine.prompts)
    refs = [SpeakerRef.from_info(info) for info in infos]
    return [names[ref.audio_sha256] for ref in refs if ref]


async def test_after_a_restart_those_that_spoke_last_are_prefilled_again(
    start, monkeypatch
):
    # A prefill uses a voice as well; here only requests are to.
    monkeypatch.setenv("SPEAKER_CACHE_WARM_KV", "off")
    async with start() as server:
        for number in range(MAX_AGAIN + 2):
            await precompute(server, f"voice {number}", 200 + 10 * number)
        spoken = await server.speak(voice="voice 0")
        assert spoken.status_code == 200
    monkeypatch.setenv("SPEAKER_CACHE_WARM_KV", "idle")
    async with start() as server:
        last = [f"voice {number}" for number in range(MAX_AGAIN + 1, 2, -1)]
        assert await prefilled(server, MAX_AGAIN) == ["voice 0", *last]
        await soon(lambda: server.service.kv_warming.stats()["warmed"] == MAX_AGAIN)
        assert (await shown(server))["waiting"] == 0


async def test_after_a_restart_nothing_is_encoded_to_prefill_it(start):
    async with start() as server:
        await precompute(server, "Ann", 220)
        await register(server, "Bob", 330)
    async with start() as server:
        assert await prefilled(server, 1) == ["Ann"]
        assert sum(server.encodes.values()) == 0
