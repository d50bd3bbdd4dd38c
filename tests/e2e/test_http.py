"""The wire shape: stock's fields, our headers, errors with the right status."""

import json
import urllib.parse

import pytest

from vllm_tts_cache.testing.client import data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def error(response, status):
    assert response.status_code == status, response.text
    found = response.json()["error"]
    assert found["code"] == status and "Traceback" not in response.text
    return found["message"]


def test_a_registered_voice_is_shown_as_stock_shows_it(client, make_clip):
    clip = make_clip()
    answer = client.register(
        "Zoë Ä.", clip, ref_text=" Hi. ", speaker_description="warm"
    )
    voice = answer.json()["voice"]
    assert answer.json()["success"] is True
    assert (voice["name"], voice["consent"]) == ("Zoë Ä.", "consent-1")
    assert (voice["ref_text"], voice["speaker_description"]) == ("Hi.", "warm")
    assert voice["file_size"] == len(clip) and voice["embedding_source"] == "audio"
    assert isinstance(voice["created_at"], int)
    path = urllib.parse.quote("zoë ä.")
    shown = client.http.get(f"/v1/audio/voices/{path}").json()
    assert shown["voice"] == voice and shown["cache_status"] == "pending"
    listed = client.http.get("/v1/audio/voices").json()
    assert voice in listed["uploaded_voices"] and "Zoë Ä." in listed["voices"]
    gone = client.http.delete(f"/v1/audio/voices/{path}")
    assert gone.json()["success"] is True
    assert error(client.http.delete(f"/v1/audio/voices/{path}"), 404)


def test_voices_are_listed_in_pages(client, make_clip):
    for number in range(5):
        client.register(f"page-{number}", make_clip())
    seen, after = [], None
    while True:
        query = {"limit": 2, "search": "PAGE-", **({"after": after} if after else {})}
        page = client.http.get("/v1/audio/voices", params=query).json()
        seen += [voice["name"] for voice in page["uploaded_voices"]]
        if (after := page.get("next")) is None:
            break
    assert seen == [f"page-{number}" for number in range(5)]
    names = client.http.get(
        "/v1/audio/voices", params={"names_only": True, "search": "page-"}
    ).json()
    assert names == {"voices": seen}


def test_an_unknown_voice_is_named_and_nobody_else_speaks(client):
    spoken = client.speak(voice="nobody at all")
    message = json.loads(spoken.audio)["error"]["message"]
    assert spoken.status == 400
    assert "nobody at all" in message and "POST /v1/audio/voices" in message
    for method in ("get", "delete"):
        assert error(getattr(client.http, method)("/v1/audio/voices/nobody"), 404)
    assert error(client.precompute("nobody"), 404)
    assert error(client.http.get("/v1/audio/voices/nobody/cache"), 404)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": " "},
        {"name": "a/b"},
        {"name": "a\x00b"},
        {"name": "x" * 129},
        {"consent": " "},
    ],
)
def test_bad_registrations_are_refused(client, make_clip, fields):
    form = {"name": "ok", "consent": "c", **fields}
    files = {"audio_sample": ("a.wav", make_clip())}
    assert error(client.http.post("/v1/audio/voices", data=form, files=files), 400)


def test_bad_embeddings_are_refused(client):
    for values in ("[]", "[1, 2]", "{", '["a"]', "[1e999]", "null", "[NaN]"):
        form = {"name": "bad", "consent": "c", "speaker_embedding": values}
        assert error(client.http.post("/v1/audio/voices", data=form), 400)
    neither = client.http.post("/v1/audio/voices", data={"name": "n", "consent": "c"})
    assert "audio_sample" in error(neither, 400)


def test_sampling_that_would_end_the_engine_is_refused(client, make_clip):
    client.register("calm", make_clip(), ref_text="Hello there.")
    heard = client.speak("Hi.", voice="calm")
    for extra in ({"temperature": "hot"}, {"tts_local_seed": "x"}, {"top_k": 0.5}):
        refused = client.speak("Hi.", voice="calm", extra_params=extra)
        assert refused.status == 400 and b"extra_params" in refused.audio
    assert client.speak("Hi.", voice="calm").audio == heard.audio


def test_inline_audio_without_a_transcript_needs_x_vector_mode(client, make_clip):
    url = data_url(make_clip())
    refused = client.speak(ref_audio=url, task_type="Base")
    assert refused.status == 400 and b"ref_text" in refused.audio
    allowed = client.speak(ref_audio=url, task_type="Base", x_vector_only_mode=True)
    assert (allowed.status, allowed.cache) == (200, "miss")
    for bad in ("data:audio/wav;base64,AAAA", "file:///etc/passwd", "not a url"):
        assert client.speak(ref_audio=bad, x_vector_only_mode=True).status == 400


def test_every_way_to_ask_for_speech_carries_the_header(client, make_clip):
    client.register("headed", make_clip(), ref_text="Hello there.")
    client.precompute("headed")
    whole = client.speak(voice="headed", stream=False, stream_format=None)
    stream = client.speak(voice="headed")
    events = client.speak(voice="headed", stream_format="sse")
    assert (whole.cache, stream.cache, events.cache) == ("hit", "hit", "hit")
    assert whole.audio == stream.audio
    assert events.audio.startswith(b"event: speech.audio.delta")
    body = {
        "voice": "headed",
        "response_format": "pcm",
        "items": [{"input": "Hi."}, {"input": "Hi.", "voice": "nobody"}],
    }
    batch = client.http.post("/v1/audio/speech/batch", json=body)
    assert batch.headers["X-Speaker-Cache"] == "hit"
    results = batch.json()["results"]
    assert [r["status"] for r in results] == ["success", "error"]
    assert "not registered" in results[1]["error"]


def test_the_websocket_stream_speaks_with_a_registered_voice(client, shared_server):
    from websockets.sync.client import connect

    from tests.audio_clips import sndfile_bytes, voiced

    clip = sndfile_bytes(voiced(pitch_hz=777.0), 24_000)
    client.register("socket", clip, ref_text="Hello there.")
    expected = client.speak("Hello world.", voice="socket").audio
    url = shared_server.url.replace("http", "ws") + "/v1/audio/speech/stream"
    with connect(url) as socket:
        for message in (
            {
                "type": "session.config",
                "voice": "socket",
                "response_format": "pcm",
                "stream_audio": True,
                "seed": 7,
            },
            {"type": "input.text", "text": "Hello world."},
            {"type": "input.done"},
        ):
            socket.send(json.dumps(message))
        heard = bytearray()
        while True:
            received = socket.recv(timeout=60)
            if isinstance(received, bytes):
                heard += received
            elif json.loads(received)["type"] == "session.done":
                break
    assert bytes(heard) == expected


def test_a_failing_precompute_says_why_and_the_next_call_tries_again(
    client, shared_server, make_clip
):
    clip = make_clip()
    voice = client.register("failing", clip, ref_text="Hi.").json()["voice"]
    store = shared_server.options.samples_dir / "store"
    (stored,) = store.rglob(f"{voice['audio_sha256']}/audio.*")
    stored.unlink()
    assert "not stored" in error(failed := client.precompute("failing"), 500)
    assert failed.json()["cache_status"] == "failed"
    status = client.http.get("/v1/audio/voices/failing/cache").json()
    assert status["cache_status"] == "failed" and "not stored" in status["error"]
    client.register("failing", clip, ref_text="Hi.")
    assert client.precompute("failing").json()["cache_status"] == "ready"


def test_stats_show_registry_and_every_tier(client, make_clip):
    stats = client.stats()
    assert stats["registry"]["speakers"] >= 0
    (worker,) = stats["workers"]
    fields = {"entries", "bytes", "max_bytes", "hits", "misses", "evictions"}
    assert fields <= worker["tiers"]["memory"].keys()
    assert stats["storage"]["registered"]["audio"].keys() == {"files", "bytes"}
    assert {"encodes", "failed_prompts", "in_flight"} <= worker.keys()
