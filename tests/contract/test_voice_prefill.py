"""Whether voices are prefilled for a decoder: where it keeps states of them only."""

import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes, voiced
from tests.speech_server import Server, running
from tests.waiting import soon
from vllm_tts_cache.entrypoints import kv_warming


@pytest.fixture
async def server(default_checkpoint, tmp_path, monkeypatch):
    """One that has its engine for itself."""
    monkeypatch.setattr(kv_warming, "LOOK_SECONDS", 0.001)
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        engine = server.engine
        engine.engine._client_config = {}
        engine._paused = engine._sleeping_tags = engine.errored = False
        engine.request_states = {}
        yield server


async def precompute(server, name, pitch_hz):
    samples = (voiced(pitch_hz=pitch_hz) * 32767).astype(np.int16)
    clip = sndfile_bytes(samples, 24_000, "WAV")
    await server.register(name, clip, ref_text="words", precompute="false")
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
