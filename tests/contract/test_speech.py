"""Speech requests through the host's real routes, serving class and adapter."""

import asyncio
import json
import sys

import pytest

from tests.asgi import http_scope
from tests.speaking import (
    as_events,
    as_raw_stream,
    by_websocket,
    data_url,
    in_a_batch,
    plainly,
    registered,
    wav,
)
from tests.waiting import soon
from vllm_tts_cache.audio.decode import decode
from vllm_tts_cache.speaker.family import default_family
from vllm_tts_cache.speaker.reference import FIELD

BATCH = "/v1/audio/speech/batch"


async def test_a_voice_may_be_an_object_with_its_id_wherever_it_speaks(server):
    await registered(server)
    shown = (await server.client.get("/v1/audio/voices/Ann")).json()["voice"]
    known, unknown = {"id": shown["id"]}, {"id": f"voice_{0:032}"}
    for speak in (in_a_batch, by_websocket):
        for field in ("voice", "speaker"):
            assert await speak(server, **{field: known}) is None
            said = await speak(server, **{field: unknown})
            assert said is not None and "is not registered" in said
    items = [{"input": "Hi.", "voice": voice} for voice in (known, unknown)]
    answer = await server.client.post(BATCH, json={"items": items})
    assert answer.headers["X-Speaker-Cache"] == "hit"
    statuses = [each["status"] for each in answer.json()["results"]]
    assert statuses == ["success", "error"]


async def test_an_object_without_an_id_is_no_voice(server):
    await registered(server)
    for voice in ({}, {"id": None}, {"name": "Ann"}, {"id": ["Ann"]}):
        said = await by_websocket(server, voice=voice)
        assert said is not None and "voice must be a name, an id" in said
        for body in (
            {"voice": voice, "items": [{"input": "Hi."}]},
            {"items": [{"input": "Hi.", "voice": voice}]},
        ):
            answer = await server.client.post(BATCH, json=body)
            assert answer.status_code == 400
            assert "voice must be a name, an id" in answer.text


@pytest.mark.environment(SPEAKER_CACHE_MAX_WAITING_INLINE="2")
async def test_refused_inline_clips_push_out_no_audio_of_those_that_wait(server):
    """Each was stored before it was refused: a flood filled the inline segment."""
    pitches = [100.0 + 10 * number for number in range(6)]

    def stored():
        waves = (decode(wav(pitch_hz=pitch)) for pitch in pitches)
        return [store.has_audio(each.audio.audio_sha256) for each in waves]

    store, (encoder, *_) = server.service.store, server.encoders
    encoder.gate.clear()
    asked = [
        server.speak(ref_audio=data_url(pitch_hz=pitch), x_vector_only_mode=True)
        for pitch in pitches
    ]
    spoken = [asyncio.create_task(each) for each in asked[:2]]
    await soon(lambda: len(server.service.encodings.pending) == 2)
    for each in asked[2:]:
        refused = await each
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
    assert stored() == [True] * 2 + [False] * 4
    encoder.gate.set()
    assert {task.status_code for task in await asyncio.gather(*spoken)} == {200}


async def test_with_an_embedding_no_voice_is_looked_up_or_read(server, monkeypatch):
    """The registered waveform was read on the loop and sent to the engine."""
    await registered(server)
    dim = server.embedding_dim
    monkeypatch.setattr(server.service.store, "read_audio", None)
    monkeypatch.setattr(server.service.store, "find", None)
    for name in ("Ann", "nobody", "default"):
        answer = await server.speak(voice=name, speaker_embedding=[0.1] * dim)
        assert answer.status_code == 200, answer.text
        assert answer.headers["X-Speaker-Cache"] == "none"
        info = server.engine.prompts[-1]["additional_information"]
        assert "ref_audio" not in info and "speaker" not in info and FIELD not in info
        assert len(info["voice_clone_prompt"][0]["ref_spk_embedding"]) == dim


async def test_the_host_bounds_a_clones_length_as_for_its_own(server):
    """It asks the request for its task after the prompt is built."""
    await registered(server)
    await server.speak(voice="Ann")
    info = server.engine.prompts[-1]["additional_information"]
    bound = f"_{default_family().name}_effective_max_tokens"
    assert info[bound] == [50]


async def test_what_the_host_refuses_is_refused_before_anything_is_fetched(server):
    await registered(server)
    await server.settled()
    server.engine.calls.clear()
    unknown = await server.speak(voice="Bob")
    assert unknown.status_code == 400 and "POST /v1/audio/voices" in unknown.text
    for wrong in ({"input": " "}, {"language": "Klingon"}, {"max_new_tokens": 100_000}):
        for speaker in ({"voice": "Ann"}, {"ref_audio": "http://127.0.0.1:9/never"}):
            answer = await server.speak(**{"ref_text": "words", **speaker, **wrong})
            assert answer.status_code == 400
            assert "fetched" not in answer.text
    assert server.engine.calls == server.engine.prompts == []


HOSTILE_SAMPLING = (
    *({"temperature": value} for value in ("hot", float("nan"), True)),
    *({"top_k": value} for value in (0.5, 2**70)),
    *({"tts_local_seed": value} for value in ("x", 2**64)),
    {"top_p": 7},
)


async def test_sampling_that_would_end_the_engine_is_refused(server):
    """The host hands it on unread, and a step of everybody's reads it."""
    await registered(server)
    kind = {"Content-Type": "application/json"}
    for extra in HOSTILE_SAMPLING:
        body = json.dumps({"input": "Hi.", "voice": "Ann", "extra_params": extra})
        post = server.client.post("/v1/audio/speech", content=body, headers=kind)
        answer = await post
        assert answer.status_code == 400, (extra, answer.text)
        assert "extra_params" in answer.text
    assert server.engine.prompts == []
    fine = {"temperature": 1, "top_k": 5, "tts_local_seed": 7}
    assert (await server.speak(voice="Ann", extra_params=fine)).status_code == 200


async def test_a_voice_that_nobody_can_be_called_costs_the_others_nothing(server):
    """Its marks were put in order by their square, while everybody waited."""
    voice = "a" + 100_000 * "\u0300" + 100_000 * "\u0327"
    answer = await asyncio.wait_for(server.speak(voice=voice), 60)
    assert answer.status_code == 400
    assert "Invalid voice: at most 1,024 characters" in answer.text
    for field in ("search", "after", "label"):
        query = {field: f"x:{voice[:5_000]}"}
        listed = await server.client.get("/v1/audio/voices", params=query)
        assert listed.status_code == 400, field
    assert server.engine.prompts == []


SLASHES = 200_000 * "/a"


TOO_MUCH = (
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
)


async def test_what_says_too_much_is_refused_before_it_is_read(server):
    """The host repeats it, and goes through what it repeats by its square."""
    for path, body in TOO_MUCH:
        post = server.client.post(f"/v1/audio/{path}", json=body)
        answer = await asyncio.wait_for(post, 60)
        assert answer.status_code == 400, (path, answer.text[:500])
        assert len(answer.content) < 4_000
    assert server.engine.prompts == []


READS_NO_DIRECTORY = "_refresh_uploaded_speakers"  # vLLM-Omni 0.32 calls it
HOSTS_SIDE = ("/vllm_omni/", "/vllm/", "/fastapi/", "/starlette/")


async def test_a_warm_request_changes_hands_where_the_host_calls_us(server):
    """Twelve calls from the host to ours, and one for each message of the client."""
    await registered(server)
    await server.speak(voice="Ann")
    called, resumed, known, inside = [], set(), set(), []

    def see(frame, event, _):
        code = frame.f_code
        is_ours = "/vllm_tts_cache/" in code.co_filename
        if not is_ours and not any(part in code.co_filename for part in HOSTS_SIDE):
            return
        if event == "call":
            # A background task of ours has nobody's frame below it. What the host logs
            # passes our filter.
            is_entered = is_ours and inside and not inside[-1]
            if is_entered and code.co_name not in ("_quiet", READS_NO_DIRECTORY):
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
    assert len(called) <= 12 + 3, called
    assert len(resumed) <= 5, resumed  # await the host or the client, or the outputs


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

    scope = http_scope("POST", BATCH, [(b"content-type", b"application/json")])
    await server.app(scope, receive, send)
    assert said[0]["status"] == 499


@pytest.mark.parametrize("path", ["speech", "speech/batch", "voices"])
async def test_a_body_without_end_is_refused_while_it_arrives(server, path):
    num_sent = 0

    async def endless():
        nonlocal num_sent
        while num_sent < 200:
            num_sent += 1
            yield b" " * 1024 * 1024

    kind = "multipart/form-data; boundary=b" if path == "voices" else "application/json"
    sent = {"content": endless(), "headers": {"content-type": kind}}
    answer = await server.client.post(f"/v1/audio/{path}", **sent)
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
    monkeypatch.setattr(server.service.encodings.pending, "_max_inline", 0)
    for speak in (plainly, as_raw_stream, as_events):
        answer = await speak(server, ref_audio=data_url(), x_vector_only_mode=True)
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) > 0
