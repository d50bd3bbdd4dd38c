"""A client that speaks all the time, to hear whether others disturb it."""

import threading
from contextlib import contextmanager

from vllm_tts_cache.testing.server import SpeechClient

TEXT = "Somebody else's words, which go on for a while. " * 4


@contextmanager
def undisturbed(url, voice, headers=None):
    """One stream after another inside; each is what it was with nobody beside it."""
    client = SpeechClient(url)
    client.http.headers.update(headers or {})
    alone = client.speak(TEXT, voice=voice)
    assert alone.status == 200 and alone.audio, alone
    ended, heard = threading.Event(), []

    def go_on():
        while not heard or not ended.is_set():
            spoken = client.speak(TEXT, voice=voice)
            heard.append(spoken)
            if spoken.audio != alone.audio:
                return

    speaking = threading.Thread(target=go_on)
    speaking.start()
    try:
        yield
    finally:
        ended.set()
        speaking.join()
        client.close()
    assert {(each.status, each.audio == alone.audio) for each in heard} == {(200, True)}
