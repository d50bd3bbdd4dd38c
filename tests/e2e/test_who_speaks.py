"""Every request has the voice that it names, whoever else speaks and in which order."""

import threading
import time

import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes, voiced
from vllm_tts_cache.speaker.family import CLONE_MODE
from vllm_tts_cache.testing.server import SpeechClient, data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.every_family]

SPOKEN = "Hello there."
TEXT = "Hello world, this is a test."
LONG_TEXT = "The tide is out, and the boats lie on the sand. " * 3


@pytest.fixture(scope="module")
def speak_alone(shared_server):
    """Speak on a connection of its own, as several threads do at once."""

    def speak(text, **fields):
        client = SpeechClient(shared_server.url)
        spoken = client.speak(text, **fields)
        client.close()
        assert spoken.status == 200, spoken.audio
        return spoken.audio

    return speak


def test_a_voice_is_encoded_once_whatever_it_is_called(client, family):
    before = client.encodes()
    # Integers, since encoders round what is not one each in their own way.
    samples = (voiced(44_100, 3.3) * 2**23).astype(np.int32) * 256
    wav = sndfile_bytes(samples, 44_100, subtype="PCM_24")
    flac = sndfile_bytes(samples, 44_100, "FLAC", "PCM_24")

    assert client.register("Ada", wav, ref_text=SPOKEN).status_code == 200
    assert client.precompute("ada").json() == {"voice": "Ada", "cache_status": "ready"}
    # It can speak before it is on the disk, which a busy machine does later.
    again = (client.precompute("ADA ").json() for _ in range(20))
    assert any("already exists" in each.get("message", "") for each in again)

    spoken = [client.speak(TEXT, voice="Ada") for _ in range(3)]
    assert [(s.status, s.cache) for s in spoken] == [(200, "hit")] * 3
    client.register("Ada's twin", flac, ref_text=SPOKEN)
    twin = client.speak(TEXT, voice="Ada's twin")
    # In the same mode, whatever a transcript selects.
    words = {"ref_text": SPOKEN} if family.stored_transcript_selects else {}
    inline = client.speak(TEXT, ref_audio=data_url(flac), task_type="Base", **words)
    heard = {s.audio for s in (*spoken, twin, inline)}
    assert len(heard) == 1 and len(spoken[0].audio) > 0
    by_vector = client.speak(TEXT, voice="Ada", x_vector_only_mode=True)
    if family.embedding_mode:
        assert (by_vector.status, by_vector.cache) == (200, "hit")
        assert by_vector.audio not in heard
    else:  # a family without the mode says so
        assert by_vector.status == 400 and b"x_vector_only_mode" in by_vector.audio
    after = client.encodes()
    made = {name: after[name] - before[name] for name in after}
    assert made == dict.fromkeys(family.encoders, 1)


def test_two_new_ones_beside_a_third_keep_their_voices(client, make_clip, speak_alone):
    """A host that hands its second stage the wrong request's prompt swaps them."""
    texts = {"run": LONG_TEXT, "new one": "Hi.", "new two": "Hi."}
    for name in texts:
        client.register(name, make_clip(), ref_text=SPOKEN)
        client.precompute(name).raise_for_status()
    alone = {name: speak_alone(text, voice=name) for name, text in texts.items()}
    assert len(set(alone.values())) == 3

    heard = {}

    def run(name):
        heard[name] = speak_alone(texts[name], voice=name)

    threads = {name: threading.Thread(target=run, args=(name,)) for name in texts}
    threads["run"].start()
    time.sleep(0.3)
    threads["new one"].start()
    threads["new two"].start()
    for thread in threads.values():
        thread.join()
    assert heard == alone


def test_a_name_then_its_transcript_then_inline_audio_are_each_themselves(
    client, family, make_clip, speak_alone
):
    """Stock VoxCPM2 ends its engine here; others kept one's audio as the other's."""
    client.register("Eve", make_clip(), ref_text=SPOKEN)
    named = speak_alone("Hi.", voice="Eve")
    spoken = speak_alone("Hi.", voice="Eve", ref_text=SPOKEN)
    for seconds in (1.0, 4.0):  # shorter and longer than the voice's own
        inline = {"ref_audio": data_url(make_clip(seconds)), "ref_text": SPOKEN}
        alone = speak_alone("Hi.", **inline)
        assert speak_alone("Hi.", voice="Eve", **inline) == alone
        assert alone not in (named, spoken)
    assert speak_alone("Hi.", voice="Eve") == named
    assert speak_alone("Hi.", voice="Eve", ref_text=SPOKEN) == spoken


def test_a_request_may_name_any_of_its_modes(client, family, make_clip, speak_alone):
    client.register("Mo", make_clip(), ref_text=SPOKEN)

    def speak_in(mode):
        named = {CLONE_MODE: mode.name}
        return speak_alone("Hi.", voice="Mo", extra_params=named, **mode.example)

    heard = {mode.name: speak_in(mode) for mode in family.modes}
    assert len(set(heard.values())) == len(family.modes)
    assert speak_alone("Hi.", voice="Mo") in heard.values()
    refused = client.speak("Hi.", voice="Mo", extra_params={CLONE_MODE: "by ear"})
    assert refused.status == 400
    assert all(mode.name.encode() in refused.audio for mode in family.modes)
