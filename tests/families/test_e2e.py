"""What some families have over HTTP: streams of talkers, one KV prefix per voice."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.crowds import prefix_tokens
from tests.e2e.test_hostile_speech import spoken_by_socket
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.offline import PreparedSpeaker
from vllm_tts_cache.speaker.checkpoint_dir import read_json
from vllm_tts_cache.speaker.family import CloneFacts
from vllm_tts_cache.speaker.reference import SpeakerRef
from vllm_tts_cache.store.encoding import EncodingKey
from vllm_tts_cache.store.opening import open_existing
from vllm_tts_cache.testing.server import data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SPOKEN = "These are the words of the reference."
TEXT = "Hello there, this is a test."
TEXTS = ("Hello there.", "Something else is said now, and it is longer.", "A third.")
LONG_SECONDS = 29.5


def audio(spoken):
    assert spoken.status == 200 and spoken.audio, spoken.audio
    return spoken.audio


def registered(client, name, clip):
    assert client.register(name, clip, ref_text=SPOKEN).status_code == 200
    assert client.precompute(name).json()["cache_status"] == "ready"


@pytest.mark.does("streams")
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
    socket = {"voice": "every way", "stream_audio": True}
    assert spoken_by_socket(shared_server, TEXT, **socket) == (stream.audio, [])
    assert client.encodes() == before


@pytest.mark.does("shares_kv")
def test_a_new_text_of_a_voice_prefills_only_itself(client, make_clip):
    registered(client, "long", make_clip(LONG_SECONDS))
    inline = {"ref_audio": data_url(make_clip(LONG_SECONDS)), "ref_text": SPOKEN}
    for who in ({"voice": "long"}, inline):
        _, had, found = prefix_tokens(client, lambda who=who: client.speak(**who))
        assert had - found > 600  # all of it; what came before may be counted late
        for text in TEXTS[1:]:
            speak = lambda text=text, who=who: client.speak(text, **who)  # noqa: E731
            first, had, found = prefix_tokens(client, speak)
            assert found / had >= 0.9
            again, _, _ = prefix_tokens(client, speak)
            assert again.audio == first.audio


@pytest.mark.does("shares_kv")
def test_another_voice_with_the_same_transcript_shares_no_block(client, make_clip):
    heard = []
    for name in ("first", "second"):
        registered(client, name, make_clip(10.0))
        spoken, _, found = prefix_tokens(
            client, lambda name=name: client.speak(TEXTS[0], voice=name)
        )
        assert found == 0
        heard.append(spoken.audio)
    assert heard[0] != heard[1]


@pytest.mark.does("shares_kv")
def test_no_client_decides_how_anothers_voice_sounds(
    family, checkpoint, client, shared_server, make_clip
):
    """A client computed Fish Speech's prefix without its codes, under its salt."""
    clip = make_clip(10.0)
    registered(client, "poisoned", clip)
    heard = audio(client.speak(TEXT, voice="poisoned"))
    prompt = guessed(family, checkpoint, shared_server, "poisoned")
    told = prompt.get("additional_information", prompt)
    salted = {"model": "tts", "max_tokens": 2}
    salted["cache_salt"] = prompt.get("cache_salt", "salt")
    client.http.delete("/v1/audio/voices/poisoned").raise_for_status()
    registered(client, "poisoned", clip)

    ids = prompt.get("prompt_token_ids", [1] * 60)
    once = {"Connection": "close"}  # as the host does after a 500
    client.http.post("/v1/completions", json={**salted, "prompt": ids}, headers=once)
    hidden = {"cache_salt": salted["cache_salt"], "additional_information": told}
    client.speak(TEXT, **hidden, extra_params=hidden)
    chat = {**salted, "messages": [{"role": "user", "content": TEXT}]}
    chat["chat_template"] = "{{ messages[0].content }}"
    chat |= {"modalities": ["audio"], "additional_information": told}
    refused = client.http.post("/v1/chat/completions", json=chat, headers=once)
    assert 400 <= refused.status_code < 500, refused.text

    speak = lambda: client.speak(TEXT, voice="poisoned")  # noqa: E731
    spoken, _, found = prefix_tokens(client, speak)
    assert (audio(spoken), spoken.cache, found) == (heard, "hit", 0)


def guessed(family, checkpoint, server, name):
    """The prompt that any owner of the clip can make: all of it but what is keyed."""
    samples_dir = str(server.options.samples_dir)
    settings = load_settings({"SPEAKER_SAMPLES_DIR": samples_dir})
    with closing(open_existing(settings)) as store:
        speaker = store.find(name)
        assert speaker is not None
        record = speaker.record

        def encoding(ref, _):
            (fingerprint,) = speaker.fingerprints
            key = EncodingKey(
                audio_sha256=ref.audio_sha256, encoder_fingerprint=fingerprint
            )
            return key, store.read(key)

        config = read_json(checkpoint / "config.json")
        prompts = family.part("offline_part")(str(checkpoint), config, encoding)
        prepared = PreparedSpeaker(
            clip=Path("unread"),
            ref=SpeakerRef(
                audio_sha256=record.audio_sha256 or "", segment=Segment.REGISTERED
            ),
            mode=family.mode(CloneFacts(stored_transcript=True)),
            ref_text=SPOKEN,
            num_samples=record.num_samples,
            sample_rate_hz=record.sample_rate_hz,
        )
        return prompts.prompt(prepared, TEXT, "Auto")
