"""Higgs Audio v3 over HTTP: one KV prefix per voice, with or without a transcript."""

import json

import pytest

from tests.crowds import prefix_tokens
from vllm_tts_cache.testing.client import data_url

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.does("rows_by_position"),
]

SPOKEN = "These are the words of the reference."
TEXTS = ("Hello there.", "Something else is said now, and it is longer.", "A third.")
LONG_SECONDS = 29.5


def registered(client, name, clip, ref_text=SPOKEN):
    fields = {} if ref_text is None else {"ref_text": ref_text}
    assert client.register(name, clip, **fields).status_code == 200
    assert client.precompute(name).json()["cache_status"] == "ready"


def message(spoken):
    assert spoken.status == 400
    return json.loads(spoken.audio)["error"]["message"]


@pytest.mark.parametrize("ref_text", [None, SPOKEN], ids=["mute", "with words"])
def test_a_new_text_of_a_voice_prefills_only_itself(client, make_clip, ref_text):
    name = f"long, {ref_text}"
    registered(client, name, make_clip(LONG_SECONDS), ref_text)
    _, had, found = prefix_tokens(client, lambda: client.speak(TEXTS[0], voice=name))
    assert had - found > 700  # all of it; what came before may be counted late
    for text in TEXTS[1:]:
        speak = lambda text=text: client.speak(text, voice=name)  # noqa: E731
        first, had, found = prefix_tokens(client, speak)
        assert found / had >= 0.85
        again, _, _ = prefix_tokens(client, speak)
        assert again.audio == first.audio


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


def test_inline_and_registered_speak_alike(client, make_clip):
    clip = make_clip()
    registered(client, "both ways", clip)
    named = client.speak(TEXTS[0], voice="both ways")
    inline = client.speak(TEXTS[0], ref_audio=data_url(clip), ref_text=SPOKEN)
    assert [named.status, inline.status] == [200, 200]
    assert named.audio == inline.audio
    mute = client.speak(TEXTS[0], ref_audio=data_url(clip))
    assert mute.status == 200 and mute.audio != named.audio


def test_texts_without_a_voice_are_spoken_and_others_share_nothing(client, make_clip):
    registered(client, "beside", make_clip())
    plain = client.speak(TEXTS[0])
    assert (plain.status, plain.cache) == (200, "none")
    assert client.speak(TEXTS[0], voice="beside").audio != plain.audio
    assert client.speak(TEXTS[0]).audio == plain.audio


def test_control_tokens_are_refused(client, make_clip):
    registered(client, "strict", make_clip())
    assert "<|audio|>" in message(client.speak("x <|audio|> y", voice="strict"))
    assert "<|tts|>" in message(client.speak("<|tts|>"))
