"""OmniVoice requests through the host's real routes and serving class."""

from functools import partial

from tests.families.omnivoice.case import CASE
from tests.families.serving import ann, message, served
from tests.speaking import as_events, as_raw_stream, lose_files
from tests.two_tenants import two_tenants
from vllm_tts_cache.entrypoints.serving.serving import MAX_SUBMITS
from vllm_tts_cache.speaker.reference import FIELD, REQUEST_FIELD

SPOKEN = "What is said in it"


async def test_a_clone_is_told_its_text_its_transcript_and_who_speaks(server):
    sha = (await ann(server, ref_text=SPOKEN))["audio_sha256"]
    answer = await server.speak(voice="ANN ")
    assert answer.headers["content-type"].startswith("audio/") and answer.content
    (prompt,) = server.engine.prompts
    assert prompt.pop(REQUEST_FIELD).startswith("speech-")
    *named, _ = prompt.pop(FIELD)
    assert named == [sha, "registered", server.service.encodings.encoders_id]
    assert prompt == {"input": "Hello.", "ref_text": f"{SPOKEN}."}


async def test_what_the_host_reads_of_a_request_stays_in_its_prompt(server):
    await ann(server, ref_text=SPOKEN)
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


async def test_one_that_is_always_missing_is_an_error_with_its_cause(server):
    sha = (await ann(server, ref_text=SPOKEN))["audio_sha256"]
    assert (await server.speak(voice="Ann")).status_code == 200
    server.engine.before_prefill = [lambda: lose_files(server, sha)] * MAX_SUBMITS
    answer = await server.speak(voice="Ann")
    assert "codec encoding is not stored" in message(answer, 500)
    assert (await server.speak(voice="Ann")).status_code == 200


async def test_another_failure_of_the_engine_is_the_hosts_to_tell(server):
    await ann(server, ref_text=SPOKEN)

    def fail():
        raise RuntimeError("something else")

    server.engine.before_prefill = [fail]
    assert "something else" in message(await server.speak(voice="Ann"), 500)
    assert len(server.engine.prompts) == 1


async def test_a_stream_of_events_is_one_event_and_a_raw_one_is_answered_whole(server):
    """Stock answered either with all of the audio, and the first is none of events."""
    await ann(server, ref_text=SPOKEN)
    events = (await as_events(server)).text
    assert [events.count(f"audio.{kind}\n") for kind in ("delta", "done")] == [1, 1]
    whole = await as_raw_stream(server, voice="Ann")
    assert (whole.status_code, whole.headers["X-Speaker-Cache"]) == (200, "miss")
    assert whole.content


async def test_tenants_speak_with_their_own(own_checkpoint, tmp_path, monkeypatch):
    """The host's method looks a name up before it is asked what to do with it."""
    async with two_tenants(
        own_checkpoint, tmp_path, monkeypatch, make=partial(served, CASE)
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
