"""Two API processes on one engine: both see every change at once."""

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROUNDS = 8


def test_uploads_and_deletes_are_seen_by_both_at_once(make_server, storage, make_clip):
    clips = [make_clip(pitch_hz=300), make_clip(pitch_hz=900)]
    _, client = make_server(
        ("--api-server-count", "2"), VLLM_ENABLE_V1_MULTIPROCESSING="1"
    )

    def speak():
        # A new connection each time, so that the kernel picks either process.
        client.http.headers["Connection"] = "close"
        return client.speak("Hi.", voice="both")

    heard = []
    for clip in clips:
        assert client.register("both", clip, ref_text="Hello.").status_code == 200
        spoken = [speak() for _ in range(ROUNDS)]
        assert {s.status for s in spoken} == {200}
        assert len({s.audio for s in spoken}) == 1
        heard.append(spoken[0].audio)
    assert heard[0] != heard[1]
    assert client.encodes() == {"speaker": 2, "codec": 2}
    assert client.http.delete("/v1/audio/voices/both").status_code == 200
    assert {speak().status for _ in range(ROUNDS)} == {400}
    assert storage.verify() == []
