"""CosyVoice3 over HTTP: every mode, two voices that begin beside a third, streams."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_tts_cache.testing.client import SpeechClient, data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.does("instructions")]

SPOKEN = "What is said in it."
TEXT = "Hello there, this is a test."
SLOW = "Hello world. " * 6
MANNER = "Please speak fast."
CROSS_LINGUAL = {"extra_params": {"clone_mode": "cross_lingual"}}
ROUNDS = 3


def message(spoken):
    assert spoken.status == 400
    return json.loads(spoken.audio)["error"]["message"]


def audio(spoken):
    assert spoken.status == 200 and spoken.audio, spoken.audio
    return spoken.audio


def test_every_mode_speaks_from_encodings_that_are_made_once(client, make_clip):
    client.register("every mode", make_clip(), ref_text=SPOKEN)
    client.precompute("every mode").raise_for_status()
    before = client.encodes()
    fields = ({}, CROSS_LINGUAL, {"instructions": MANNER})
    spoken = [client.speak(TEXT, voice="every mode", **each) for each in fields]
    again = [client.speak(TEXT, voice="every mode", **each) for each in fields]
    assert [s.cache for s in spoken] == ["hit"] * 3
    assert [audio(s) for s in spoken] == [audio(s) for s in again]
    assert len({s.audio for s in spoken}) == 3
    assert client.encodes() == before


@pytest.mark.long  # one round of it is among the tests of every family
def test_two_that_begin_beside_a_running_one_keep_their_voices(
    client, shared_server, make_clip
):
    """Stock gives each of the two the other's."""
    names = ("running", "left", "right")
    for name in names:
        client.register(name, make_clip(), ref_text=SPOKEN)
        client.precompute(name).raise_for_status()
    texts = dict(zip(names, (SLOW, TEXT, TEXT), strict=True))
    alone = {name: audio(client.speak(texts[name], voice=name)) for name in names}
    assert len(set(alone.values())) == 3

    def speak(name):
        own = SpeechClient(shared_server.url)
        try:
            return audio(own.speak(texts[name], voice=name))
        finally:
            own.close()

    for _ in range(ROUNDS):
        with ThreadPoolExecutor(5) as pool:
            together = list(pool.map(speak, (*names, "left", "right")))
        expected = [alone[name] for name in (*names, "left", "right")]
        assert together == expected


def test_streams_and_batches_speak_alike(client, make_clip):
    client.register("every way", make_clip(), ref_text=SPOKEN)
    client.precompute("every way").raise_for_status()
    whole = client.speak(TEXT, voice="every way", stream=False, stream_format=None)
    stream = client.speak(TEXT, voice="every way")
    assert audio(whole) == audio(stream)
    body = {
        "voice": "every way",
        "response_format": "pcm",
        "items": [{"input": TEXT}, {"input": TEXT, "voice": "nobody"}],
    }
    batch = client.http.post("/v1/audio/speech/batch", json=body)
    assert batch.headers["X-Speaker-Cache"] == "hit"
    results = batch.json()["results"]
    assert [r["status"] for r in results] == ["success", "error"]


def test_what_the_family_does_not_have_is_refused(client, make_clip):
    client.register("bare", make_clip())
    assert "ref_audio" in message(client.speak(TEXT))
    inline = {"ref_audio": data_url(make_clip())}
    assert "cross_lingual" in message(client.speak(TEXT, **inline))
    audio(client.speak(TEXT, **inline, **CROSS_LINGUAL))
    named = {"extra_params": {"clone_mode": "zero_shot"}}
    assert "ref_text" in message(client.speak(TEXT, voice="bare", **named))
    assert "x_vector" in message(client.speak(voice="bare", x_vector_only_mode=True))
    assert "embedding" in message(client.speak(speaker_embedding=[0.1] * 192))
