"""Which voices are prefilled, and when: only while the engine is idle."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes, voiced
from tests.in_process_workers import SECRET
from tests.speech_server import Server, running
from tests.waiting import soon
from vllm_tts_cache.entrypoints.serving.host_fixes import believe_adapters_alone
from vllm_tts_cache.entrypoints.speakers import kv_warming
from vllm_tts_cache.entrypoints.speakers.kv_warming import MAX_WAITING, MIN_LOOKS
from vllm_tts_cache.speaker.reference import SpeakerRef

BUSY = {"speech": object()}  # what a request leaves in the engine client


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
        # As the host's server, whose engine refuses prompts that no adapter made.
        generate = engine.generate
        engine.generate = lambda prompt, _params, request_id, **named: generate(
            prompt=prompt, request_id=request_id, **named
        )
        holder: Any = SimpleNamespace(secret=SECRET)
        believe_adapters_alone(engine, holder)
        return running(server)

    return start


@pytest.fixture
async def server(start):
    async with start() as server:
        yield server


async def register(server, name, pitch_hz, ref_text="words"):
    samples = (voiced(pitch_hz=pitch_hz) * 32767).astype(np.int16)
    clip = sndfile_bytes(samples, 24_000, "WAV")
    texts = {} if ref_text is None else {"ref_text": ref_text}
    await server.register(name, clip, **texts)


async def precompute(server, name, pitch_hz, **texts):
    await register(server, name, pitch_hz, **texts)
    await make_ready(server, name)


async def make_ready(server, name):
    answer = await server.client.post(f"/v1/audio/voices/{name}/cache")
    assert answer.status_code == 200


async def counts(server):
    return (await server.client.get("/v1/audio/speaker_cache")).json()["kv_warming"]


async def prefilled(server, number):
    """Whose voices were prefilled, in turn, once there are so many and none waits."""
    await soon(lambda: len(server.engine.prompts) >= number)
    await soon(lambda: server.service.kv_warming.stats()["waiting"] == 0)
    voices = (await server.client.get("/v1/audio/voices")).json()["uploaded_voices"]
    found = [server.service.store.find(voice["name"]) for voice in voices]
    names = {each.record.audio_sha256: each.record.name for each in found if each}
    infos = (prompt["additional_information"] for prompt in server.engine.prompts)
    refs = [SpeakerRef.from_info(info) for info in infos]
    return [names[ref.audio_sha256] for ref in refs if ref]


async def test_voices_are_prefilled_once_nothing_is_spoken_as_they_are_then(server):
    server.engine.request_states = BUSY
    for name in ("Ann", "Bob"):  # of one clip
        await precompute(server, name, 220)
    await precompute(server, "Eve", 330)
    await server.speak(voice="Eve")  # which needs no prefill any more
    server.engine.prompts.clear()
    assert (await server.client.delete("/v1/audio/voices/Ann")).status_code == 200
    renamed = await server.client.patch("/v1/audio/voices/Bob", json={"name": "Cleo"})
    assert renamed.status_code == 200
    await asyncio.sleep(0.05)
    assert server.engine.prompts == []
    server.engine.request_states = {}
    assert await prefilled(server, 1) == ["Cleo"]
    assert await counts(server) == {"warmed": 1, "waiting": 0}


async def test_nothing_is_prefilled_while_voices_are_encoded(server):
    """Of thousands that are imported the newest are, when all are done."""
    server.engine.request_states = BUSY
    await precompute(server, "Ann", 220)
    server.encoders[0].gate.clear()
    server.encoders[0].entered.clear()
    making = asyncio.create_task(precompute(server, "Bob", 330))
    await asyncio.to_thread(server.encoders[0].entered.wait, 20)
    server.engine.request_states = {}
    await asyncio.sleep(0.05)
    assert server.engine.prompts == []
    server.encoders[0].gate.set()
    await making
    assert await prefilled(server, 2) == ["Ann", "Bob"]


async def test_of_many_voices_the_newest_are_prefilled(server):
    server.engine.request_states = BUSY
    for number in range(MAX_WAITING + 2):
        await precompute(server, f"voice {number}", 200 + 10 * number)
    server.engine.request_states = {}
    newest = [f"voice {number}" for number in range(2, MAX_WAITING + 2)]
    assert await prefilled(server, MAX_WAITING) == newest


async def test_a_voice_whose_transcript_was_changed_is_prefilled_anew(server):
    """Its clip is the same, and what was computed with the other text is deleted."""
    await precompute(server, "Ann", 220)
    assert await prefilled(server, 1) == ["Ann"]
    given = {"ref_text": "More"}
    answer = await server.client.patch("/v1/audio/voices/Ann", json=given)
    assert answer.status_code == 200
    assert await prefilled(server, 2) == ["Ann", "Ann"]
    spoken = [prompt["additional_information"] for prompt in server.engine.prompts]
    assert [info["ref_text"] for info in spoken] == [["words"], ["More"]]


@pytest.fixture
def prefills(server, monkeypatch):
    """What begins and ends in an engine whose prefills go on until they are ended."""
    engine, seen = server.engine, []
    generate = engine.generate

    async def noted(*, request_id, **kwargs):
        if not request_id.startswith("prefill-"):
            seen.append("speech")
            async for output in generate(request_id=request_id, **kwargs):
                yield output
            return
        seen.append("prefill")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("ended")

    monkeypatch.setattr(engine, "generate", noted)
    return seen


async def test_a_prefill_ends_before_a_request_and_begins_anew_after(server, prefills):
    """Only its start waited for the engine to be idle."""
    await register(server, "Ann", 220)
    await precompute(server, "Bob", 330)
    await soon(lambda: prefills == ["prefill"])
    assert (await server.speak(voice="Ann")).status_code == 200
    begun = prefills.index("speech")
    assert prefills[:begun].count("ended") == prefills[:begun].count("prefill") >= 1
    await soon(lambda: prefills[-1] == "prefill")


class Looks(dict[str, object]):
    """Requests in the engine: none, and how often that was looked at."""

    number = 0

    def __bool__(self):
        self.number += 1
        return False


async def test_who_ends_it_makes_it_wait_for_longer(server, prefills, monkeypatch):
    """Between requests that come too soon for it, it would begin anew for ever."""
    for name, pitch_hz in (("Ann", 220), ("Bob", 330)):
        await register(server, name, pitch_hz)
    server.engine.request_states = looks = Looks()
    await make_ready(server, "Ann")
    for number in range(1, 4):
        await soon(lambda number=number: prefills.count("prefill") == number)
        assert looks.number == MIN_LOOKS * 2 ** (number - 1)
        looks.number = 0
        server.service.kv_warming.stop()
    monkeypatch.setattr(kv_warming, "PREFILL_SECONDS", 0.0)  # it ends by itself
    await soon(lambda: server.service.kv_warming.stats()["waiting"] == 0)
    looks.number = 0
    await make_ready(server, "Bob")
    await soon(lambda: server.service.kv_warming.stats()["waiting"] == 0)
    assert looks.number == MIN_LOOKS


async def test_a_prefill_that_fails_or_hangs_is_given_up(server, prefills, monkeypatch):
    monkeypatch.setattr(kv_warming, "PREFILL_SECONDS", 0.01)
    await precompute(server, "Ann", 220)
    await soon(lambda: server.service.kv_warming.stats()["waiting"] == 0)
    monkeypatch.setattr(server.engine, "generate", None)
    await precompute(server, "Bob", 330)
    await soon(lambda: server.service.kv_warming.stats()["waiting"] == 0)
    assert await counts(server) == {"warmed": 0, "waiting": 0}


async def test_where_the_decoder_keeps_no_states_nothing_is_prefilled(server):
    """It replays CUDA graphs, or has no chunks: the host's first chunk stays."""
    for worker in server.engine.workers:
        del worker.model_runner.model.tts_cache_decoder_states
    await precompute(server, "Ann", 220)
    assert await prefilled(server, 0) == []
    assert await counts(server) == {"warmed": 0, "waiting": 0}


@pytest.mark.parametrize("why", ["switched off", "others speak", "no transcript"])
async def test_where_a_prefill_brings_nothing_there_is_none(start, monkeypatch, why):
    if why == "switched off":
        monkeypatch.setenv("SPEAKER_CACHE_WARM_KV", "off")
    async with start() as server:
        if why == "others speak":
            server.engine.engine._client_config = {"client_count": 2}
        ref_text = None if why == "no transcript" else "words"
        await precompute(server, "Ann", 220, ref_text=ref_text)
        await asyncio.sleep(0.05)
        assert server.engine.prompts == []


async def test_after_a_restart_the_last_that_spoke_are_prefilled(start, monkeypatch):
    # A prefill uses a voice as well; here only requests are to.
    monkeypatch.setenv("SPEAKER_CACHE_WARM_KV", "off")
    async with start() as server:
        for number in range(MAX_WAITING + 2):
            await precompute(server, f"voice {number}", 200 + 10 * number)
        assert (await server.speak(voice="voice 0")).status_code == 200
    monkeypatch.setenv("SPEAKER_CACHE_WARM_KV", "idle")
    async with start() as server:
        last = [f"voice {number}" for number in range(MAX_WAITING + 1, 2, -1)]
        assert await prefilled(server, MAX_WAITING) == ["voice 0", *last]


async def test_after_a_restart_nothing_is_encoded_to_prefill_it(start):
    async with start() as server:
        await precompute(server, "Ann", 220)
        await register(server, "Bob", 330)
    async with start() as server:
        assert await prefilled(server, 1) == ["Ann"]
        assert sum(server.encodes.values()) == 0
