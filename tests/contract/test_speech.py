"""Speech requests through the host's real routes, serving class and adapter."""

import asyncio
import base64
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from vllm.v1.engine.exceptions import EngineGenerateError

from tests.audio_clips import sndfile_bytes, voiced
from tests.in_process_workers import clip, new_speaker, store_clip
from tests.speech_server import Server, running
from tests.waiting import SOON_SECONDS, soon
from vllm_tts_cache.audio.decode import decode
from vllm_tts_cache.catalogue.record import NewSpeaker
from vllm_tts_cache.entrypoints import kv_warming, upload_rests
from vllm_tts_cache.entrypoints.speech import MAX_SUBMITS
from vllm_tts_cache.entrypoints.wants import MAX_TRIES, GoneError
from vllm_tts_cache.speaker.family import default_family
from vllm_tts_cache.speaker.ref import FIELD
from vllm_tts_cache.tenants import Tenant


def wav(**kwargs):
    return sndfile_bytes((voiced(**kwargs) * 32767).astype(np.int16), 24_000, "WAV")


def data_url(**kwargs):
    return f"data:audio/wav;base64,{base64.b64encode(wav(**kwargs)).decode()}"


@pytest.fixture
async def server(default_checkpoint, tmp_path, monkeypatch):
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        yield server


async def test_a_registered_voice_speaks_and_its_second_request_waits_for_nothing(
    server,
):
    assert (await server.register("Ann", wav(), ref_text="words")).status_code == 200
    first = await server.speak(voice="Ann")
    assert (first.status_code, first.headers["X-Speaker-Cache"]) == (200, "miss")
    calls = len(server.engine.calls)
    second = await server.speak(voice="ANN ")
    assert (second.status_code, second.headers["X-Speaker-Cache"]) == (200, "hit")
    assert len(server.engine.calls) == calls
    assert server.encodes == {"speaker": 1, "codec": 1}


# -------- what the engine could not find


async def plainly(server, **fields):
    return await server.speak(**fields)


async def as_raw_stream(server, **fields):
    return await server.speak(
        stream=True, stream_format="audio", response_format="pcm", **fields
    )


async def as_events(server, **fields):
    return await server.speak(
        stream=True, stream_format="sse", response_format="pcm", **fields
    )


WAYS = pytest.mark.parametrize("speak", [plainly, as_raw_stream, as_events])


async def in_a_batch(server, **fields):
    """One item; returns its error, None if it was spoken."""
    answer = await server.client.post(
        "/v1/audio/speech/batch", json={"items": [{"input": "Hi."}], **fields}
    )
    assert answer.status_code == 200
    return answer.json()["results"][0].get("error")


async def by_websocket(server, key=None, **fields):
    """One utterance, streamed; returns its error, None if it was spoken."""
    authorization = (
        [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    )
    told = asyncio.Queue()
    for message in (
        {"type": "session.config", "stream_audio": True, "response_format": "pcm"}
        | fields,
        {"type": "input.text", "text": "Hello."},
        {"type": "input.done"},
    ):
        told.put_nowait({"type": "websocket.receive", "text": json.dumps(message)})
    told_first, said = [{"type": "websocket.connect"}], []

    async def receive():
        return told_first.pop() if told_first else await told.get()

    async def send(message):
        said.append(message)
        if "session.done" in message.get("text", ""):
            told.put_nowait({"type": "websocket.disconnect", "code": 1000})

    scope = {
        "type": "websocket",
        "path": "/v1/audio/speech/stream",
        "raw_path": b"",
        "query_string": b"",
        "headers": authorization,
        "subprotocols": [],
        "scheme": "ws",
        "root_path": "",
        "app": server.app,
    }
    await server.app(scope, receive, send)
    texts = [json.loads(m["text"]) for m in said if m.get("text")]
    errors = [text["message"] for text in texts if text["type"] == "error"]
    num_bytes = sum(len(m["bytes"]) for m in said if m.get("bytes"))
    assert errors or num_bytes > 0, texts
    return errors[0] if errors else None


@pytest.mark.parametrize("speak", [in_a_batch, by_websocket])
@pytest.mark.parametrize("field", ["voice", "speaker"])
async def test_a_voice_may_be_an_object_with_its_id_wherever_it_speaks(
    server, speak, field
):
    await registered(server)
    shown = (await server.client.get("/v1/audio/voices/Ann")).json()["voice"]
    assert await speak(server, **{field: {"id": shown["id"]}}) is None
    unknown = {"id": f"voice_{0:032}"}
    said = await speak(server, **{field: unknown})
    assert said is not None and "is not registered" in said


@pytest.mark.parametrize("voice", [{}, {"id": None}, {"name": "Ann"}, {"id": ["Ann"]}])
async def test_an_object_without_an_id_is_no_voice(server, voice):
    await registered(server)
    said = await by_websocket(server, voice=voice)
    assert said is not None and "voice must be a name, an id" in said
    for body in (
        {"voice": voice, "items": [{"input": "Hi."}]},
        {"items": [{"input": "Hi.", "voice": voice}]},
    ):
        answer = await server.client.post("/v1/audio/speech/batch", json=body)
        assert answer.status_code == 400
        assert "voice must be a name, an id" in answer.text


async def test_each_item_of_a_batch_may_have_its_own_voice_object(server):
    await registered(server)
    shown = (await server.client.get("/v1/audio/voices/Ann")).json()["voice"]
    items = [
        {"input": "Hi.", "voice": {"id": shown["id"]}},
        {"input": "Hi.", "voice": {"id": "nobody"}},
    ]
    answer = await server.client.post("/v1/audio/speech/batch", json={"items": items})
    statuses = [each["status"] for each in answer.json()["results"]]
    assert statuses == ["success", "error"]


def lose_files(server, sha):
    """Somebody removed the encodings; the catalogue does not know."""
    # The file of an encoding is there before its job is over.
    until = time.monotonic() + SOON_SECONDS
    while server.speakers.stats().in_flight:
        assert time.monotonic() < until
        time.sleep(0.01)
    for path in (server.directory / "store").rglob("*.safetensors"):
        if path.stem != "audio":
            path.unlink()
    server.speakers.delete([sha])


async def registered(server, name="Ann", **kwargs):
    done = await server.register(name, wav(**kwargs), ref_text="words")
    assert done.status_code == 200, done.text
    assert (await server.client.post(f"/v1/audio/voices/{name}/cache")).is_success
    return done.json()["voice"]["audio_sha256"]


@WAYS
async def test_a_prompt_that_is_missing_in_the_engine_is_ensured_and_sent_once_more(
    server, speak
):
    sha = await registered(server)
    server.engine.before_prefill = [lambda: lose_files(server, sha)]
    answer = await speak(server, voice="Ann")
    assert answer.status_code == 200, answer.text
    assert len(answer.content) > 4_800
    assert b"error" not in answer.content
    assert answer.headers["X-Speaker-Cache"] == "miss"
    assert len(server.engine.prompts) == 2
    assert server.encodes == {"speaker": 2, "codec": 2}


@pytest.mark.parametrize("speak", [in_a_batch, by_websocket])
async def test_so_it_is_in_a_batch_and_on_a_websocket(server, speak):
    sha = await registered(server)
    server.engine.before_prefill = [lambda: lose_files(server, sha)]
    assert await speak(server, voice="Ann") is None
    assert len(server.engine.prompts) == 2


@WAYS
async def test_a_prompt_that_is_missing_once_more_is_sent_again(server, speak):
    sha = await registered(server)
    server.engine.before_prefill = [lambda: lose_files(server, sha)] * 2
    assert (await speak(server, voice="Ann")).status_code == 200
    assert len(server.engine.prompts) == 3


@WAYS
async def test_a_prompt_that_is_always_missing_is_an_error_that_says_why(server, speak):
    sha = await registered(server)
    server.engine.before_prefill = [lambda: lose_files(server, sha)] * MAX_SUBMITS
    answer = await speak(server, voice="Ann")
    assert answer.status_code == 500
    told = answer.json()["error"]["message"]
    # As it happens: lost after it was published, or before.
    assert "is not stored" in told or "neither in memory nor on the disk" in told
    assert len(server.engine.prompts) <= MAX_SUBMITS
    assert (await speak(server, voice="Ann")).status_code == 200


@WAYS
async def test_a_voice_that_was_replaced_meanwhile_speaks_as_the_new_one(server, speak):
    sha = await registered(server, pitch_hz=220)
    new = []

    def replace():
        lose_files(server, sha)
        store = server.service.store
        new.append(store_clip(store, clip(1), name="Ann"))
        store.files.discard(sha, 0)

    server.engine.before_prefill = [replace]
    answer = await speak(server, voice="Ann", x_vector_only_mode=True)
    assert answer.status_code == 200, answer.text
    told = [p["additional_information"][FIELD][0] for p in server.engine.prompts]
    assert told == [sha, new[0].audio_sha256]


def replaced_each_time(server, sha):
    """Before each prefill the voice has another clip, and the files of the last go."""
    store = server.service.store
    numbers, shas = iter(range(1, 100)), [sha]

    def replace():
        lose_files(server, shas[-1])
        record = store_clip(store, clip(next(numbers)), name="Ann")
        store.files.discard(shas[-1], 0)
        shas.append(record.audio_sha256)

    return [replace] * MAX_SUBMITS


BUSY_REPLACING = "Voice 'Ann' is being replaced"


@WAYS
async def test_a_voice_that_is_replaced_at_each_submit_is_to_be_asked_for_later(
    server, speak
):
    """It was a 500, as if the server had failed."""
    sha = await registered(server)
    server.engine.before_prefill = replaced_each_time(server, sha)
    answer = await speak(server, voice="Ann", x_vector_only_mode=True)
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) > 0
    assert BUSY_REPLACING in answer.json()["error"]["message"]
    assert len(server.engine.prompts) == MAX_SUBMITS
    again = await speak(server, voice="Ann", x_vector_only_mode=True)
    assert again.status_code == 200, again.text


@pytest.mark.parametrize("speak", [in_a_batch, by_websocket])
async def test_so_it_says_in_a_batch_and_on_a_websocket(server, speak):
    sha = await registered(server)
    server.engine.before_prefill = replaced_each_time(server, sha)
    told = await speak(server, voice="Ann", x_vector_only_mode=True)
    assert BUSY_REPLACING in told


@WAYS
async def test_a_voice_that_is_deleted_before_the_last_submit_is_not_registered(
    server, speak
):
    sha = await registered(server)

    def delete():
        store = server.service.store
        store.remove_files(store.delete("Ann"))
        lose_files(server, sha)

    lose = [lambda: lose_files(server, sha)] * (MAX_SUBMITS - 1)
    server.engine.before_prefill = [*lose, delete]
    answer = await speak(server, voice="Ann")
    assert answer.status_code == 400, answer.text
    assert "'Ann' is not registered" in answer.json()["error"]["message"]


@WAYS
async def test_a_voice_that_was_deleted_meanwhile_is_not_registered(server, speak):
    sha = await registered(server)

    def delete():
        store = server.service.store
        store.remove_files(store.delete("Ann"))
        lose_files(server, sha)

    server.engine.before_prefill = [delete]
    answer = await speak(server, voice="Ann")
    assert answer.status_code == 400
    assert "'Ann' is not registered" in answer.json()["error"]["message"]


@WAYS
@pytest.mark.parametrize("is_deleted", [True, False])
async def test_what_goes_while_the_prompt_is_made_is_resolved_once_more(
    server, speak, monkeypatch, is_deleted
):
    """Where the codes are read for prompts it was a 500."""
    await registered(server)
    adapter = type(server.handler._get_tts_adapter())
    clone, fails = adapter.clone, [GoneError("it is gone")]

    async def cloned(self, speaker):
        if fails:
            if is_deleted:
                store = server.service.store
                store.remove_files(store.delete("Ann"))
            raise fails.pop()
        return await clone(self, speaker)

    monkeypatch.setattr(adapter, "clone", cloned)
    answer = await speak(server, voice="Ann")
    assert answer.status_code == (400 if is_deleted else 200), answer.text
    assert (b"not registered" in answer.content) is is_deleted


async def test_a_voice_that_is_replaced_twice_while_its_prompt_is_made_speaks(
    server, monkeypatch
):
    """With the second time it was a 500."""
    await registered(server)
    adapter = type(server.handler._get_tts_adapter())
    clone, spoken = adapter.clone, []

    async def cloned(self, speaker):
        spoken.append(speaker.ref.audio_sha256)
        if len(spoken) < MAX_TRIES:
            store_clip(server.service.store, clip(len(spoken)), name="Ann")
            raise GoneError("it is gone")
        return await clone(self, speaker)

    monkeypatch.setattr(adapter, "clone", cloned)
    answer = await server.speak(voice="Ann", x_vector_only_mode=True)
    assert answer.status_code == 200, answer.text
    assert len(set(spoken)) == MAX_TRIES


@WAYS
async def test_one_that_is_replaced_each_time_that_its_prompt_is_made_is_a_503(
    server, speak, monkeypatch
):
    await registered(server)
    adapter = type(server.handler._get_tts_adapter())
    spoken = []

    async def cloned(self, speaker):
        spoken.append(speaker.ref.audio_sha256)
        store_clip(server.service.store, clip(len(spoken)), name="Ann")
        raise GoneError("it is gone")

    monkeypatch.setattr(adapter, "clone", cloned)
    answer = await speak(server, voice="Ann", x_vector_only_mode=True)
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) > 0
    assert BUSY_REPLACING in answer.json()["error"]["message"]
    assert len(set(spoken)) == MAX_TRIES


async def test_what_goes_each_time_of_a_voice_that_stays_is_the_servers_failure(
    server, monkeypatch
):
    await registered(server)

    async def cloned(self, speaker):
        raise GoneError("it is gone")

    monkeypatch.setattr(type(server.handler._get_tts_adapter()), "clone", cloned)
    answer = await server.speak(voice="Ann")
    assert answer.status_code == 500, answer.text


@pytest.mark.parametrize("num_times", [MAX_TRIES - 1, MAX_TRIES])
async def test_a_precompute_follows_a_voice_that_is_replaced_and_then_says_so(
    server, monkeypatch, num_times
):
    """With the second time it was a 500."""
    await registered(server)
    encodings = server.service.encodings
    ensure, asked = encodings.ensure, []

    async def replacing(tenant, need, **how):
        asked.append(need.ref.audio_sha256)
        if len(asked) <= num_times:
            store_clip(server.service.store, clip(len(asked)), name="Ann")
            raise GoneError("it is gone")
        return await ensure(tenant, need, **how)

    monkeypatch.setattr(encodings, "ensure", replacing)
    answer = await server.client.post("/v1/audio/voices/Ann/cache")
    assert len(set(asked)) == MAX_TRIES
    if num_times < MAX_TRIES:
        assert answer.json()["cache_status"] == "ready", answer.text
        return
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) > 0
    assert BUSY_REPLACING in answer.json()["error"]["message"]


async def test_an_embedding_that_another_replaces_while_it_is_read_speaks(
    server, monkeypatch
):
    """It was a 400: not registered."""
    dim = server.engine.model_config.hf_config.talker_config.hidden_size
    store = server.service.store

    def register(value):
        raw = NewSpeaker(name="Ann", consent="y", embedding=(value,) * dim)
        return store.register(raw, None)

    register(0.125)
    look = store.catalogue.speaker_embedding

    def late(record):
        if record.generation == 1:
            register(0.25)
        return look(record)

    monkeypatch.setattr(store.catalogue, "speaker_embedding", late)
    answer = await server.speak(voice="Ann")
    assert answer.status_code == 200, answer.text
    (prompt,) = server.engine.prompts
    spoken = prompt["additional_information"]["voice_clone_prompt"][0]
    assert set(spoken["ref_spk_embedding"]) == {0.25}


async def test_a_voice_that_an_embedding_replaces_while_its_prompt_is_made_speaks(
    server, monkeypatch
):
    """It was a 400 that told a client to try again."""
    await registered(server)
    adapter = type(server.handler._get_tts_adapter())
    dim = server.engine.model_config.hf_config.talker_config.hidden_size

    async def cloned(self, speaker):
        raw = NewSpeaker(name="Ann", consent="y", embedding=(0.125,) * dim)
        server.service.store.register(raw, None)
        raise GoneError("it is gone")

    monkeypatch.setattr(adapter, "clone", cloned)
    answer = await server.speak(voice="Ann")
    assert answer.status_code == 200, answer.text
    (prompt,) = server.engine.prompts
    info = prompt["additional_information"]
    assert FIELD not in info
    assert len(info["voice_clone_prompt"][0]["ref_spk_embedding"]) == dim


async def test_inline_clips_that_are_refused_push_out_no_audio_of_those_that_wait(
    default_checkpoint, tmp_path, monkeypatch
):
    """Each was stored before it was refused: a flood filled the inline segment."""
    monkeypatch.setenv("SPEAKER_CACHE_MAX_WAITING_INLINE", "2")
    pitches = [100.0 + 10 * number for number in range(6)]

    def stored():
        waves = (decode(wav(pitch_hz=pitch)) for pitch in pitches)
        return [store.has_audio(each.audio.audio_sha256) for each in waves]

    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        store, (encoder, *_) = server.service.store, server.encoders
        encoder.gate.clear()
        asked = [
            server.speak(ref_audio=data_url(pitch_hz=pitch), x_vector_only_mode=True)
            for pitch in pitches
        ]
        spoken = [asyncio.create_task(each) for each in asked[:2]]
        await soon(lambda: server.service.encodings.num_flights == 2)
        for each in asked[2:]:
            refused = await each
            assert refused.status_code == 503
            assert int(refused.headers["Retry-After"]) > 0
        assert stored() == [True] * 2 + [False] * 4
        encoder.gate.set()
        assert {task.status_code for task in await asyncio.gather(*spoken)} == {200}


@WAYS
async def test_an_inline_clip_that_goes_with_a_voice_is_stored_again(server, speak):
    """The retry stored it again, and then failed anyway."""
    sha = await registered(server)

    def delete():
        store = server.service.store
        store.remove_files(store.delete("Ann"))
        lose_files(server, sha)

    server.engine.before_prefill = [delete]
    answer = await speak(server, ref_audio=data_url(), x_vector_only_mode=True)
    assert answer.status_code == 200, answer.text
    assert len(server.engine.prompts) == 2
    assert server.service.store.has_audio(sha)


async def test_an_inline_clip_that_is_deleted_while_it_waits_is_stored_again(server):
    server.encoders[0].gate.clear()
    blocker = asyncio.create_task(
        server.speak(ref_audio=data_url(pitch_hz=500), x_vector_only_mode=True)
    )
    await asyncio.to_thread(server.encoders[0].entered.wait, 20)
    sha = decode(wav()).audio.audio_sha256
    waiting = asyncio.create_task(
        server.speak(ref_audio=data_url(), x_vector_only_mode=True)
    )
    store = server.service.store
    while not store.has_audio(sha):
        await asyncio.sleep(0.01)
    store.register(new_speaker("Ann", decode(wav()).audio), decode(wav()))
    store.remove_files(store.delete("Ann"))
    server.encoders[0].gate.set()
    assert (await waiting).status_code == (await blocker).status_code == 200
    assert store.has_audio(sha)


async def test_a_failure_that_is_not_ours_stays_the_hosts(server):
    await registered(server)

    def fail():
        raise EngineGenerateError("out of something")

    server.engine.before_prefill = [fail]
    answer = await server.speak(voice="Ann")
    assert answer.status_code == 500
    assert len(server.engine.prompts) == 1


# -------- what a request names


async def test_an_unknown_voice_is_told_with_the_way_to_register_it(server):
    await server.settled()
    server.engine.calls.clear()
    answer = await server.speak(voice="Bob")
    assert answer.status_code == 400
    assert "POST /v1/audio/voices" in answer.json()["error"]["message"]
    assert server.engine.calls == []


@pytest.mark.parametrize("name", ["Ann", "nobody", "default"])
async def test_with_an_embedding_a_voice_is_ignored_and_nothing_is_read(
    server, name, monkeypatch
):
    """The registered waveform was read on the loop and sent to the engine."""
    await registered(server)
    dim = server.engine.model_config.hf_config.talker_config.hidden_size
    monkeypatch.setattr(server.service.store, "read_audio", None)
    monkeypatch.setattr(server.service.store, "find", None)
    answer = await server.speak(voice=name, speaker_embedding=[0.1] * dim)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Speaker-Cache"] == "none"
    info = server.engine.prompts[-1]["additional_information"]
    assert "ref_audio" not in info and "speaker" not in info and FIELD not in info
    assert len(info["voice_clone_prompt"][0]["ref_spk_embedding"]) == dim


async def test_the_placeholder_is_no_voice(server):
    answer = await server.speak(voice="default")
    assert answer.status_code == 400
    assert "not registered" not in answer.text
    spoken = await server.speak(
        voice="Default", ref_audio=data_url(), x_vector_only_mode=True
    )
    assert spoken.status_code == 200, spoken.text


async def test_a_registered_embedding_speaks(server):
    dim = server.engine.model_config.hf_config.talker_config.hidden_size
    done = await server.client.post(
        "/v1/audio/voices",
        data={"name": "E", "consent": "y", "speaker_embedding": str([0.5] * dim)},
    )
    assert done.status_code == 200, done.text
    assert (await server.speak(voice="e")).status_code == 200
    prompt = server.engine.prompts[-1]["additional_information"]["voice_clone_prompt"]
    assert prompt[0]["ref_spk_embedding"] == [0.5] * dim


async def test_the_host_bounds_a_clones_length_as_for_its_own(server):
    """It asks the request for its task after the prompt is built."""
    await registered(server)
    await server.speak(voice="Ann")
    info = server.engine.prompts[-1]["additional_information"]
    bound = f"_{default_family().name}_effective_max_tokens"
    assert info[bound] == [50]


@pytest.mark.parametrize(
    "wrong", [{"input": " "}, {"language": "Klingon"}, {"max_new_tokens": 100_000}]
)
async def test_what_the_host_refuses_is_refused_before_anything_is_fetched(
    server, wrong
):
    await registered(server)
    server.engine.calls.clear()
    for speaker in ({"voice": "Ann"}, {"ref_audio": "http://127.0.0.1:9/never"}):
        answer = await server.speak(**{"ref_text": "words", **speaker, **wrong})
        assert answer.status_code == 400
        assert "fetched" not in answer.text
    assert server.engine.calls == server.engine.prompts == []


HOSTILE_SAMPLING = (
    {"temperature": "hot"},
    {"temperature": float("nan")},
    {"temperature": True},
    {"top_k": 0.5},
    {"top_k": 2**70},
    {"top_p": 7},
    {"tts_local_seed": "x"},
    {"tts_local_seed": 2**64},
)


@pytest.mark.parametrize("extra", HOSTILE_SAMPLING, ids=str)
async def test_sampling_that_would_end_the_engine_is_refused(server, extra):
    """The host hands it on unread, and a step of everybody's reads it."""
    await registered(server)
    body = json.dumps({"input": "Hi.", "voice": "Ann", "extra_params": extra})
    answer = await server.client.post(
        "/v1/audio/speech", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    assert "extra_params" in answer.text
    assert server.engine.prompts == []


async def test_sampling_that_is_fine_reaches_the_engine(server):
    await registered(server)
    extra = {"temperature": 1, "top_k": 5, "tts_local_seed": 7}
    assert (await server.speak(voice="Ann", extra_params=extra)).status_code == 200


# -------- names that are none


async def test_a_voice_that_nobody_can_be_called_costs_the_others_nothing(server):
    """Its marks were put in order by their square, while everybody waited."""
    voice = "a" + 100_000 * "\u0300" + 100_000 * "\u0327"
    answer = await asyncio.wait_for(server.speak(voice=voice), 10)
    assert answer.status_code == 400
    assert "Invalid voice: at most 1,024 characters" in answer.text
    for field in ("search", "after", "label"):
        query = {field: f"x:{voice[:5_000]}"}
        listed = await server.client.get("/v1/audio/voices", params=query)
        assert listed.status_code == 400, field
    assert server.engine.prompts == []


SLASHES = 200_000 * "/a"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("speech", {"input": "Hi.", "model": SLASHES}),
        ("speech", {"input": SLASHES, "voice": "Ann"}),
        ("speech", {"input": "Hi.", "speaker_embedding": 100_000 * [{}]}),
        ("speech", {"input": "Hi.", "extra_params": {"deep": 100_000 * [{}]}}),
        ("speech", {"input": "Hi.", "ref_audio": f"http://h{SLASHES}"}),
        ("speech", {"input": "Hi.", "of_nobody": 1_000_000 * [0]}),
        ("speech/batch", {"items": 100_000 * [0], "voice": "Ann"}),
        ("speech/batch", {"items": [{"input": "Hi."}], "language": SLASHES}),
        ("speech/batch", {"items": [{"input": "Hi.", "model": SLASHES}]}),
        ("generate", {"input": "Hi.", "model": SLASHES}),
    ],
)
async def test_what_says_too_much_is_refused_before_it_is_read(server, path, body):
    """The host repeats it, and goes through what it repeats by its square."""
    post = server.client.post(f"/v1/audio/{path}", json=body)
    answer = await asyncio.wait_for(post, 10)
    assert answer.status_code == 400, answer.text[:500]
    assert len(answer.content) < 4_000
    assert server.engine.prompts == []


async def test_a_voice_is_remembered_once_however_it_is_spelt(server):
    await registered(server)
    lookups, tenant = server.service.lookups, Tenant()
    lookups.known.trust(float("inf"))
    for num_spaces in (0, 1, 1_000_000):
        found = await lookups.find_to_speak(tenant, "Ann" + num_spaces * " ")
        assert found.record.name == "Ann"
    assert len(lookups.known) == 1
    assert await lookups.find_to_speak(tenant, 2_000 * "a") is None


# -------- uploads


async def test_uploads_rest_while_something_is_spoken(server, monkeypatch):
    """The threads that take them in leave the cores to those that speak."""
    monkeypatch.setattr(upload_rests, "FACTOR", 1e6)
    monkeypatch.setattr(upload_rests, "MAX_SECONDS", 1e6)
    server.engine.request_states = {"speech": object()}
    await registered(server)
    # There are two threads, one of which has rested by now at the most.
    names = "Bob", "Cleo", "Dee"
    later = [asyncio.create_task(registered(server, name)) for name in names]
    await asyncio.wait(later, timeout=3 * upload_rests.LOOK_SECONDS)
    assert not all(each.done() for each in later)
    # What decodes no clip is behind none of them.
    change = server.client.patch(
        "/v1/audio/voices/Ann", json={"speaker_description": "Tall."}
    )
    assert (await asyncio.wait_for(change, 10)).status_code == 200
    assert not all(each.done() for each in later)
    server.engine.request_states = {}
    await asyncio.wait_for(asyncio.gather(*later), 10)


# -------- what goes on without anybody's request


@pytest.fixture
def prefills(server, monkeypatch):
    """What begins and ends in an engine whose prefills go on until they are ended."""
    engine, seen = server.engine, []
    monkeypatch.setattr(kv_warming, "LOOK_SECONDS", 0.001)
    engine.engine._client_config = {}  # this process is alone
    engine._paused = engine._sleeping_tags = engine.errored = False
    engine.request_states = {}
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


async def test_a_prefill_ends_before_a_request_and_begins_again_after_it(
    server, prefills
):
    """Only its start waited for the engine to be idle."""
    for name, pitch_hz in (("Ann", 220), ("Bob", 330)):
        await server.register(name, wav(pitch_hz=pitch_hz), ref_text="words")
    await server.client.post("/v1/audio/voices/Bob/cache")
    await soon(lambda: prefills == ["prefill"])
    assert (await server.speak(voice="Ann")).status_code == 200
    # Ann was encoded first: a second one began meanwhile, and ended as well.
    begun = prefills.index("speech")
    assert prefills[:begun].count("ended") == prefills[:begun].count("prefill") >= 1
    await soon(lambda: prefills[-1] == "prefill")
    await server.client.delete("/v1/audio/voices/Bob")
    assert prefills[-1] == "ended"


# -------- how a request goes through


HOSTS_SIDE = ("/vllm_omni/", "/vllm/", "/fastapi/", "/starlette/")


async def test_a_warm_request_changes_hands_where_the_host_calls_us(server):
    """Seven calls from the host's side to ours, and one for each message of the client.

    None can go while the host is as it is. FastAPI calls a route before it reads the
    body (`guarded`), for each message (`receive` counts what comes; of this client two
    for the body, and one that says whether it has left), for the JSON of it, whose
    limits are looked at before pydantic looks (`json`), and with what it has read
    (`create_speech`). The serving class has one place where a request becomes a prompt
    (`_prepare_speech_generation`), and asks its adapter twice there. The outputs it
    takes from us one by one, as a prompt may be lost (`_until_begun`). Once the speaker
    was resolved around the host as well.
    """
    await registered(server)
    await server.speak(voice="Ann")
    called, resumed, known, inside = [], set(), set(), []

    def see(frame, event, _):
        code = frame.f_code
        is_ours = "/vllm_tts_cache/" in code.co_filename
        if not is_ours and not any(part in code.co_filename for part in HOSTS_SIDE):
            return
        if event == "call":
            # What a background task of ours does has nobody's frame below it. Each
            # line that the host logs passes our filter.
            is_entered = is_ours and inside and not inside[-1]
            if is_entered and Path(code.co_filename).stem != "nameless_logs":
                if frame in known:  # that awaits something, or has yielded
                    resumed.add(code.co_name)
                else:
                    known.add(frame)
                    called.append(code.co_name)
            inside.append(is_ours)
        elif event == "return" and inside:
            inside.pop()

    sys.setprofile(see)
    try:
        answer = await server.speak(voice="Ann")
    finally:
        sys.setprofile(None)
    assert answer.headers["X-Speaker-Cache"] == "hit"
    first = "guarded", "receive", "receive", "json", "create_speech"
    speech = "_prepare_speech_generation", "validate", "build", "_until_begun"
    called.reverse()
    called.remove("receive")  # which the host listens to beside what it does
    called.reverse()
    assert called == [*first, *speech]
    # Those that await the host or the client, and the outputs.
    waiting = {"guarded", "create_speech", "_prepare_speech_generation", "build"}
    assert resumed <= waiting | {"_until_begun"}


async def test_a_stream_that_fails_before_its_first_audio_is_counted_as_over(server):
    server.app.state.enable_server_load_tracking = True
    server.app.state.server_load_metrics = 0
    sha = await registered(server)
    for _ in range(2):
        server.engine.before_prefill = [lambda: lose_files(server, sha)] * MAX_SUBMITS
        assert (await as_raw_stream(server, voice="Ann")).status_code == 500
        server.engine.before_prefill = []
        assert (await as_raw_stream(server, voice="Ann")).status_code == 200
    assert server.app.state.server_load_metrics == 0


async def test_a_batch_whose_client_hangs_up_is_no_error_of_ours(server):
    """The host answers None, and we took its headers."""
    server.encoders[0].gate.clear()
    await server.register("Ann", wav())
    said, body = [], json.dumps({"items": [{"input": "Hi."}], "voice": "Ann"}).encode()
    messages = [{"type": "http.request", "body": body}]

    async def receive():
        if messages:
            return messages.pop()
        await asyncio.to_thread(server.encoders[0].entered.wait, 20)
        return {"type": "http.disconnect"}

    async def send(message):
        said.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/audio/speech/batch",
        "raw_path": b"",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("s", 80),
        "client": ("c", 1),
        "root_path": "",
    }
    await server.app(scope, receive, send)
    assert said[0]["status"] == 499


@pytest.mark.parametrize(
    "path", ["/v1/audio/speech", "/v1/audio/speech/batch", "/v1/audio/voices"]
)
async def test_a_body_without_end_is_refused_while_it_arrives(server, path):
    num_sent = 0

    async def endless():
        nonlocal num_sent
        while num_sent < 200:
            num_sent += 1
            yield b" " * 1024 * 1024

    kind = "multipart/form-data; boundary=b" if "voices" in path else "application/json"
    answer = await server.client.post(
        path, content=endless(), headers={"content-type": kind}
    )
    assert answer.status_code in (400, 413)
    assert num_sent < 80


async def test_what_names_no_audio_is_refused_beyond_1_mib(server):
    """64 MiB of it were read, of which the host wants a text and some numbers."""
    answers = [
        await server.client.post("/v1/audio/generate", json={"input": "x" * num_chars})
        for num_chars in (1000 * 1024, 1024 * 1024)
    ]
    assert [answer.status_code == 413 for answer in answers] == [False, True]


async def test_a_busy_server_says_when_to_come_back(server, monkeypatch):
    wants = server.service.encodings.ensurer._poller._wants
    monkeypatch.setattr(wants, "_max_inline", 0)
    for speak in (plainly, as_raw_stream, as_events):
        answer = await speak(server, ref_audio=data_url(), x_vector_only_mode=True)
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) > 0
