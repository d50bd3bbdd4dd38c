"""VoxCPM2 over HTTP: what ended stock's engine speaks, beside others and streamed."""

import json

import pytest

from vllm_tts_cache.testing.client import data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.does("continuation")]

SPOKEN = "What is said in it."
TEXT = "Hello there, this is a test."
CONTINUED = {"extra_params": {"clone_mode": "continuation"}}


def message(spoken):
    assert spoken.status == 400
    return json.loads(spoken.audio)["error"]["message"]


def audio(spoken):
    assert spoken.status == 200 and spoken.audio, spoken.audio
    return spoken.audio


def test_a_stored_transcript_is_used_where_the_request_names_the_mode(
    client, make_clip
):
    clip = make_clip()
    client.register("stored", clip, ref_text=SPOKEN)
    client.register("bare", clip)
    plain = audio(client.speak(TEXT, voice="stored"))
    assert audio(client.speak(TEXT, voice="bare")) == plain
    continued = audio(client.speak(TEXT, voice="stored", **CONTINUED))
    assert audio(client.speak(TEXT, voice="bare", ref_text=SPOKEN)) == continued
    assert continued != plain
    refused = message(client.speak(TEXT, voice="bare", **CONTINUED))
    assert "ref_text" in refused and "'reference'" in refused


def test_streams_batches_and_sockets_speak_alike(client, shared_server, make_clip):
    client.register("every way", make_clip(), ref_text=SPOKEN)
    client.precompute("every way").raise_for_status()
    before = client.encodes()
    whole = client.speak(TEXT, voice="every way", stream=False, stream_format=None)
    stream = client.speak(TEXT, voice="every way")
    events = client.speak(TEXT, voice="every way", stream_format="sse")
    assert [s.cache for s in (whole, stream, events)] == ["hit"] * 3
    assert audio(whole) == audio(stream)
    assert events.audio.startswith(b"event: speech.audio.delta")
    body = {
        "voice": "every way",
        "response_format": "pcm",
        "items": [{"input": TEXT}, {"input": TEXT, "voice": "nobody"}],
    }
    batch = client.http.post("/v1/audio/speech/batch", json=body)
    assert batch.headers["X-Speaker-Cache"] == "hit"
    results = batch.json()["results"]
    assert [r["status"] for r in results] == ["success", "error"]
    assert by_socket(shared_server, "every way") == stream.audio
    assert client.encodes() == before


def by_socket(server, voice):
    from websockets.sync.client import connect

    heard = bytearray()
    config = {"voice": voice, "response_format": "pcm", "stream_audio": True, "seed": 7}
    with connect(server.url.replace("http", "ws") + "/v1/audio/speech/stream") as ws:
        for sent in (
            {"type": "session.config", **config},
            {"type": "input.text", "text": TEXT},
            {"type": "input.done"},
        ):
            ws.send(json.dumps(sent))
        while True:
            received = ws.recv(timeout=60)
            if isinstance(received, bytes):
                heard += received
            elif json.loads(received)["type"] == "session.done":
                return bytes(heard)


def test_a_text_that_begins_with_a_control_token_is_refused(client, make_clip):
    """Stock's engine ended by it, without any voice."""
    assert "<s>" in message(client.speak("<s>Hello."))
    inline = {"ref_audio": data_url(make_clip())}
    assert "<s>" in message(client.speak("<s>Hello.", **inline))
    assert "<s>" in message(client.speak(TEXT, **inline, ref_text="<s>Hello."))
    plain = [client.speak(TEXT, voice=voice) for voice in (None, "default")]
    assert [s.cache for s in plain] == ["none"] * 2
    assert audio(plain[0]) == audio(plain[1])


def test_what_the_family_does_not_have_is_refused(client, make_clip):
    client.register("plain", make_clip(), ref_text=SPOKEN)
    assert "x_vector" in message(client.speak(voice="plain", x_vector_only_mode=True))
    assert "embedding" in message(client.speak(speaker_embedding=[0.1] * 64))
    form = {"name": "raw", "consent": "c", "speaker_embedding": str([0.1] * 64)}
    refused = client.http.post("/v1/audio/voices", data=form)
    assert refused.status_code == 400 and "audio_sample" in refused.text
