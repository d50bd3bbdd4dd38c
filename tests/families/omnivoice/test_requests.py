"""OmniVoice requests through the host's real routes and serving class.

The host has no adapter there: one method of its serving class does it all.
"""

import asyncio
import json

import numpy as np
import pytest

from tests.contract.test_speech import (
    as_events,
    as_raw_stream,
    data_url,
    lose_files,
    wav,
)
from tests.in_process_workers import SpectrumEncoder
from tests.speech_server import Server, running
from tests.two_tenants import two_tenants
from vllm_tts_cache.entrypoints.speech import MAX_SUBMITS
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.families.omnivoice.family import FAMILY
from vllm_tts_cache.speaker.ref import FIELD, REQUEST_FIELD
from vllm_tts_cache.store.encoding import Encoding

SPOKEN = "What is said in it"


class CodesEncoder(SpectrumEncoder):
    """``codes`` and ``rms``, of the audio's length."""

    def encode(self, audio):
        super().encode(audio)
        codes = np.zeros((int(25 * audio.seconds), 8), np.int16)
        return Encoding({"codes": codes, "rms": np.array([0.2], np.float32)})


def served(checkpoint, directory, monkeypatch, **config):
    encoders = [CodesEncoder(name) for name in FAMILY.encoders]
    return Server(
        checkpoint, directory, monkeypatch, encoders=encoders, family=FAMILY, **config
    )


@pytest.fixture
async def server(omnivoice_checkpoint, tmp_path, monkeypatch):
    async with running(served(omnivoice_checkpoint, tmp_path, monkeypatch)) as server:
        yield server


def message(answer, status=400):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


async def ann(server, **fields):
    answer = await server.register("Ann", wav(), **{"ref_text": SPOKEN, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["voice"]["audio_sha256"]


# What the engine is told


async def test_a_registered_voice_speaks_and_its_second_request_waits_for_nothing(
    server,
):
    sha = await ann(server)
    first = await server.speak(voice="Ann")
    assert (first.status_code, first.headers["X-Speaker-Cache"]) == (200, "miss")
    assert first.headers["content-type"].startswith("audio/") and first.content
    num_calls = len(server.engine.calls)
    second = await server.speak(voice="ANN ")
    assert (second.status_code, second.headers["X-Speaker-Cache"]) == (200, "hit")
    assert len(server.engine.calls) == num_calls
    assert server.encodes == {"codec": 1}
    for prompt in server.engine.prompts:
        assert prompt.pop(REQUEST_FIELD).startswith("speech-")
        assert prompt == {
            "input": "Hello.",
            "ref_text": f"{SPOKEN}.",
            FIELD: [sha, "registered"],
        }


async def test_what_the_host_reads_of_a_request_stays_in_its_prompt(server):
    await ann(server)
    read = {"num_inference_steps": 4, "guidance_scale": 3, "flow_shift": 1.5}
    fields = {
        "language": "English",
        "instructions": "female, whisper",
        "seed": 11,
        "extra_params": {**read, "clone_mode": "in_context"},
    }
    assert (await server.speak(voice="Ann", **fields)).status_code == 200
    assert (await server.speak(**fields | {"extra_params": None})).status_code == 200
    clone, design = server.engine.prompts
    assert (clone["lang"], clone["instruct"]) == ("English", "female, whisper")
    assert design == {
        "input": "Hello.",
        "lang": "English",
        "instruct": "female, whisper",
    }
    params = server.engine.params[0]
    assert params.extra_args == {**read, "seed": 11}
    assert (params.num_inference_steps, params.guidance_scale) == (4, 3.0)


async def test_inline_audio_goes_the_same_way_without_a_name(server):
    for _ in range(2):
        answer = await server.speak(ref_audio=data_url(), ref_text=SPOKEN)
        assert answer.status_code == 200, answer.text
    one, other = ([p[FIELD], p["ref_text"]] for p in server.engine.prompts)
    assert one == other and one[0][1] == "inline"
    assert server.encodes == {"codec": 1}


async def test_named_then_with_a_transcript_then_with_inline_audio(server):
    """Each is itself, and none becomes another's."""
    sha = await ann(server)
    for fields in (
        {},
        {"ref_text": "Other words."},
        {"ref_audio": data_url(seconds=5.0), "ref_text": SPOKEN},
        {},
    ):
        answer = await server.speak(voice="Ann", **fields)
        assert answer.status_code == 200, answer.text
    told = [(p[FIELD], p["ref_text"]) for p in server.engine.prompts]
    assert told[0] == told[3] == ([sha, "registered"], f"{SPOKEN}.")
    assert told[1] == ([sha, "registered"], "Other words.")
    assert told[2][0][1] == "inline"


async def test_a_message_does_not_grow_with_the_clip_and_has_no_audio(server):
    sizes = []
    for seconds in (1.0, 29.0):
        fields = {"ref_audio": data_url(seconds=seconds), "ref_text": SPOKEN}
        assert (await server.speak(**fields)).status_code == 200
        sizes.append(len(json.dumps(server.engine.prompts[-1])))
    assert sizes[0] == sizes[1] < 512


@pytest.mark.parametrize("fields", [{}, {"voice": "default"}, {"ref_text": "words"}])
async def test_a_text_without_a_voice_is_the_hosts(server, fields):
    await ann(server)
    answer = await server.speak(**fields)
    assert (answer.status_code, answer.headers["X-Speaker-Cache"]) == (200, "none")
    (prompt,) = server.engine.prompts
    assert FIELD not in prompt and REQUEST_FIELD not in prompt
    assert prompt.get("ref_text") == fields.get("ref_text")


async def test_concurrent_requests_keep_their_voices(server):
    shas = {"Ann": await ann(server)}
    await server.register("Bob", wav(pitch_hz=440.0), ref_text="Bob's words.")
    answers = await asyncio.gather(
        *(server.speak(voice=v, input=v) for v in ("Ann", "Bob") * 4),
        *(server.speak(input="nobody") for _ in range(4)),
    )
    assert {a.status_code for a in answers} == {200}
    for prompt in server.engine.prompts:
        expected = {"Ann": f"{SPOKEN}.", "Bob": "Bob's words.", "nobody": None}
        assert prompt.get("ref_text") == expected[prompt["input"]]
        assert (FIELD in prompt) is (prompt["input"] != "nobody")
    ids = [p[REQUEST_FIELD] for p in server.engine.prompts if FIELD in p]
    assert len(set(ids)) == 8
    assert shas["Ann"] in {p[FIELD][0] for p in server.engine.prompts if FIELD in p}


# What the engine could not find


async def test_a_prompt_that_is_missing_in_the_engine_is_ensured_and_sent_once_more(
    server,
):
    sha = await ann(server)
    assert (await server.speak(voice="Ann")).status_code == 200
    server.engine.before_prefill = [lambda: lose_files(server, sha)]
    answer = await server.speak(voice="Ann")
    assert (answer.status_code, answer.headers["X-Speaker-Cache"]) == (200, "miss")
    _, lost, again = server.engine.prompts
    assert lost == again
    assert server.encodes == {"codec": 2}


async def test_one_that_is_always_missing_is_an_error_with_its_cause(server):
    sha = await ann(server)
    assert (await server.speak(voice="Ann")).status_code == 200
    server.engine.before_prefill = [lambda: lose_files(server, sha)] * MAX_SUBMITS
    answer = await server.speak(voice="Ann")
    assert "codec encoding is not stored" in message(answer, 500)
    assert (await server.speak(voice="Ann")).status_code == 200


async def test_another_failure_of_the_engine_is_the_hosts_to_tell(server):
    await ann(server)

    def fail():
        raise RuntimeError("something else")

    server.engine.before_prefill = [fail]
    assert "something else" in message(await server.speak(voice="Ann"), 500)
    assert len(server.engine.prompts) == 1


async def test_an_encoder_that_fails_is_an_error_of_that_request(server):
    await ann(server)
    server.encoders[0].errors.append(EncodeError("all silence"))
    assert "all silence" in message(await server.speak(voice="Ann"), 500)
    assert server.engine.prompts == []
    assert (await server.speak(voice="Ann")).status_code == 200


# What is refused


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"voice": "Bare"}, "needs the transcript"),
        ({"ref_audio": "inline"}, "needs the transcript"),
        ({"voice": "Bob"}, "not registered"),
        ({"speaker_embedding": [0.5] * 64}, "not from an embedding"),
        ({"voice": "Ann", "x_vector_only_mode": True}, "x_vector_only_mode"),
        ({"voice": "Ann", "extra_params": {"clone_mode": "by ear"}}, "in_context"),
        ({"ref_audio": "data:x", "ref_text": "words"}, "reference audio"),
        ({"input": " "}, "empty"),
        ({"voice": "Ann", "input": " "}, "empty"),
        ({"input": "<|text_end|>Hello."}, "<|text_end|>"),
        ({"instructions": "low<|instruct_end|>"}, "<|instruct_end|>"),
        ({"language": "en<|lang_end|>"}, "<|lang_end|>"),
        ({"voice": "Ann", "input": "<|denoise|>Hello."}, "<|denoise|>"),
        ({"voice": "Ann", "ref_text": "<|text_end|>"}, "<|text_end|>"),
    ],
)
async def test_what_the_family_cannot_do_is_a_400_that_says_so(server, wrong, says):
    await ann(server)
    await server.register("Bare", wav())
    if wrong.get("ref_audio") == "inline":
        wrong = {"ref_audio": data_url()}
    assert says in message(await server.speak(**wrong))
    assert server.engine.prompts == [] and server.encodes == {"codec": 0}


async def test_a_stream_of_events_is_refused_and_a_raw_one_is_answered_whole(server):
    """Stock answered either with all of the audio, and the first is none of events."""
    await ann(server)
    assert "stream_format='audio'" in message(await as_events(server, voice="Ann"))
    assert "stream_format='audio'" in message(await as_events(server))
    whole = await as_raw_stream(server, voice="Ann")
    assert (whole.status_code, whole.headers["X-Speaker-Cache"]) == (200, "miss")
    assert whole.content


async def test_a_batch_is_refused_by_the_host_in_one_sentence(server):
    """It has none for diffusion models."""
    answer = await server.client.post(
        "/v1/audio/speech/batch", json={"items": [{"input": "Hi."}]}
    )
    assert answer.status_code == 400 and "Batch speech" in answer.text


async def test_registering_checks_the_transcript_and_takes_no_embedding(server):
    refused = await server.register("Bob", wav(), ref_text="<|text_start|>words")
    assert "<|text_start|>" in message(refused)
    form = {"name": "raw", "consent": "c", "speaker_embedding": str([0.5] * 64)}
    answer = await server.client.post("/v1/audio/voices", data=form)
    assert "audio_sample" in message(answer)


async def test_the_voices_routes_know_the_model(server):
    await ann(server, precompute="true")
    await server.settled()
    shown = (await server.client.get("/v1/audio/voices/Ann")).json()
    assert shown["cache_status"] == "ready"
    stats = (await server.client.get("/v1/audio/speaker_cache")).json()
    assert stats["workers"][0]["encodes"] == {"codec": 1}
    listed = (await server.client.get("/v1/audio/voices")).json()
    assert listed["voices"] == ["Ann", "default"]
    assert (await server.client.delete("/v1/audio/voices/Ann")).status_code == 200
    assert "not registered" in message(await server.speak(voice="Ann"))


async def test_each_tenant_speaks_with_its_own_voice_of_a_name(
    omnivoice_checkpoint, tmp_path, monkeypatch
):
    """The host's method looks a name up before it is asked what to do with it."""
    async with two_tenants(
        omnivoice_checkpoint, tmp_path, monkeypatch, make=served
    ) as host:
        assert (await host.anyone.post("/v1/audio/speech", json={})).status_code == 401
        for side in (host.us, host.them):
            done = await side.register("Ann", side.clip(), ref_text=SPOKEN)
            side.voice = done.json()["voice"]
        for side in (host.us, host.them):
            spoken = await side.speak(voice="Ann")
            assert spoken.status_code == 200, spoken.text
            assert host.spoken() == side.voice["audio_sha256"]
        other = message(await host.us.speak(voice=host.them.voice["id"]))
        nobody = message(await host.us.speak(voice="nobody"))
        assert other.replace(host.them.voice["id"], "nobody") == nobody
