"""Every request has the voice that it names, whoever else speaks and in which order."""

import threading
import time

import pytest

from vllm_tts_cache.speaker.modes import CLONE_MODE
from vllm_tts_cache.testing.client import SpeechClient, data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.every_family]

SPOKEN = "Hello there."
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


def test_two_new_requests_beside_a_running_one_keep_their_voices(
    client, make_clip, speak_alone
):
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


def test_a_request_may_name_any_mode_of_the_model_and_no_other(
    client, family, make_clip, speak_alone
):
    client.register("Mo", make_clip(), ref_text=SPOKEN)
    heard = {
        mode.name: speak_alone("Hi.", voice="Mo", extra_params={CLONE_MODE: mode.name})
        for mode in family.modes
    }
    assert len(set(heard.values())) == len(family.modes)
    assert speak_alone("Hi.", voice="Mo") in heard.values()
    refused = client.speak("Hi.", voice="Mo", extra_params={CLONE_MODE: "by ear"})
    assert refused.status == 400
    assert all(mode.name.encode() in refused.audio for mode in family.modes)
