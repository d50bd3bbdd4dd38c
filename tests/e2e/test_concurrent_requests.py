"""Many clients at once: one encode, whole voices, nobody else waits."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_tts_cache.speaker.family import CloneFacts
from vllm_tts_cache.testing.server import SpeechClient, data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.every_family]


def test_eight_cold_requests_for_one_clip_encode_it_once(family, client, make_clip):
    url, before = data_url(make_clip()), client.encodes()
    request = {"ref_audio": url, "ref_text": "Hello.", "task_type": "Base"}
    barrier = threading.Barrier(8)

    def speak(_):
        barrier.wait()
        return client.speak("Hi there.", **request)

    with ThreadPoolExecutor(8) as pool:
        spoken = list(pool.map(speak, range(8)))
    assert {s.status for s in spoken} == {200}
    mode = family.mode(CloneFacts(given_transcript=True, is_inline=True))
    expected = {name: int(name in mode.encoders) for name in family.encoders}
    after = client.encodes()
    assert {name: after[name] - before[name] for name in after} == expected


def test_each_answer_is_wholly_the_old_or_new_voice(client, shared_server, make_clip):
    clips = [make_clip(pitch_hz=2100), make_clip(pitch_hz=2700)]
    pure = []
    for clip in clips:
        client.register("changing", clip, ref_text="Hello there.")
        client.precompute("changing")
        pure.append(client.speak("Hi.", voice="changing").audio)
    assert pure[0] != pure[1]

    answers, done = [], threading.Event()

    def keep_speaking():
        own = SpeechClient(shared_server.url)
        while not done.is_set():
            answers.append(own.speak("Hi.", voice="changing"))
        own.close()

    speakers = [threading.Thread(target=keep_speaking) for _ in range(3)]
    for speaker in speakers:
        speaker.start()
    try:
        for clip in (clips[0], clips[1], clips[0]):
            assert client.http.delete("/v1/audio/voices/changing").status_code == 200
            client.register("changing", clip, ref_text="Hello there.")
            now = client.speak("Hi.", voice="changing")
            assert (now.status, now.audio) == (200, pure[clips.index(clip)])
    finally:
        done.set()
        for speaker in speakers:
            speaker.join()

    assert {a.status for a in answers} <= {200, 400}  # 400: while it was deleted
    spoken = {a.audio for a in answers if a.status == 200}
    assert spoken <= set(pure)
