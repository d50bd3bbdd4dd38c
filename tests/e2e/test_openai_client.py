"""The `openai` package, unmodified, against the real server."""

import base64
import json
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def api(shared_server):
    url = f"{shared_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture
def model(api):
    return api.models.list().data[0].id


def test_a_voice_is_made_with_a_consent_spoken_with_and_deleted(api, model, make_clip):
    clip = make_clip()
    consent = api.audio.voice_consents.create(
        name="Ann's", language="en-US", recording=("consent.wav", make_clip())
    )
    voice = api.audio.voices.create(
        name="openai-keeper", consent=consent.id, audio_sample=("clip.wav", clip)
    )
    assert (voice.object, voice.type) == ("audio.voice", "audio_sample")
    assert voice.id.startswith("voice_") and voice.name == "openai-keeper"
    said: dict[str, Any] = {
        "model": model,
        "input": "Hello there.",
        "response_format": "wav",
        "extra_body": {"seed": 7},
    }
    first = api.audio.speech.create(voice=voice.name, **said).content
    assert first.startswith(b"RIFF") and len(first) > 10_000
    assert api.audio.speech.create(voice={"id": voice.id}, **said).content == first
    with pytest.raises(openai.ConflictError, match="openai-keeper"):
        api.audio.voice_consents.delete(consent.id)
    gone = api.audio.voices.delete(voice.id)
    assert (gone.id, gone.deleted) == (voice.id, True)
    assert gone.object == "audio.voice.deleted"
    with pytest.raises(openai.NotFoundError):
        api.audio.voices.delete(voice.id)
    with pytest.raises(openai.BadRequestError, match="not registered"):
        api.audio.speech.create(voice={"id": voice.id}, **said)
    assert api.audio.voice_consents.delete(consent.id).deleted is True


def test_speech_arrives_as_events(api, model, make_clip):
    """`sse`, OpenAI's own events; no `stream` is asked for beside it."""
    voice = api.audio.voices.create(
        name="openai-events", consent="yes", audio_sample=("clip.wav", make_clip())
    )
    said: dict[str, Any] = {
        "model": model,
        "input": "Hello there.",
        "response_format": "pcm",
        "extra_body": {"seed": 7},
        "voice": {"id": voice.id},
    }
    whole = api.audio.speech.create(**said).content
    streaming = api.audio.speech.with_streaming_response
    with streaming.create(stream_format="sse", **said) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    *deltas, done = events
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert done["type"] == "speech.audio.done"
    heard = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert abs(len(heard) - len(whole)) < len(whole) / 4
    with streaming.create(stream_format="audio", **said) as answer:
        assert answer.read() == heard
    api.audio.voices.delete(voice.id)


def test_consent_recordings_are_listed_in_pages_and_renamed(api, make_clip):
    consents = api.audio.voice_consents
    made = [
        consents.create(name=f"c{n}", language="de", recording=("c.wav", make_clip()))
        for n in range(3)
    ]
    listed = [consent.id for consent in consents.list(limit=2)]
    assert listed[:3] == [consent.id for consent in reversed(made)]
    renamed = consents.update(made[1].id, name="Bea's")
    assert renamed == consents.retrieve(made[1].id)
    assert (renamed.name, renamed.language) == ("Bea's", "de")
    for consent in made:
        assert consents.delete(consent.id).object == "audio.voice_consent"
        with pytest.raises(openai.NotFoundError):
            consents.retrieve(consent.id)


def test_a_voice_of_a_description_is_refused_in_words(api):
    with pytest.raises(openai.BadRequestError, match="makes no voices from desc"):
        api.audio.voices.create(type="prompt", name="warm", prompt="a warm voice")
