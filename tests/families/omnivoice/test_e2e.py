"""OmniVoice over HTTP: what the host has of it, and what fails alone."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from websockets.sync.client import connect

from tests.served import Servers
from vllm_tts_cache.families.omnivoice.family import FAMILY
from vllm_tts_cache.testing.client import SpeechClient, data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.does("diffusion")]

SPOKEN = "What is said in it."
TEXT = "Hello there, this is a test."


def message(spoken):
    assert spoken.status == 400
    return json.loads(spoken.audio)["error"]["message"]


def audio(spoken):
    assert spoken.status == 200 and spoken.audio, spoken.audio
    return spoken.audio


def test_a_clone_a_design_and_no_voice_are_each_heard(client, make_clip):
    clip = make_clip()
    client.register("designed", clip, ref_text=SPOKEN)
    heard = {
        what: audio(client.speak(TEXT, **fields))
        for what, fields in {
            "clone": {"voice": "designed"},
            "clone with instructions": {"voice": "designed", "instructions": "whisper"},
            "design": {"instructions": "female, low pitch"},
            "auto": {},
        }.items()
    }
    assert len(set(heard.values())) == len(heard)
    inline = {"ref_audio": data_url(clip), "ref_text": SPOKEN}
    assert audio(client.speak(TEXT, **inline)) == heard["clone"]
    plain = client.speak(TEXT, voice="default")
    assert (plain.audio, plain.cache) == (heard["auto"], "none")


def test_a_transcript_is_needed_and_ends_with_a_full_stop(client, make_clip):
    clip = make_clip()
    client.register("ended", clip, ref_text="Hello there")
    client.register("bare", clip)
    assert "ref_text" in message(client.speak(TEXT, voice="bare"))
    assert "ref_text" in message(client.speak(TEXT, ref_audio=data_url(clip)))
    ended = audio(client.speak(TEXT, voice="ended"))
    assert audio(client.speak(TEXT, voice="bare", ref_text="Hello there.")) == ended
    assert audio(client.speak(TEXT, voice="bare", ref_text="Hello there?")) != ended


def test_a_quiet_reference_is_answered_as_quietly(client):
    """What makes it louder before it is encoded is undone behind."""
    import numpy as np

    from tests.audio_clips import sndfile_bytes, voiced

    levels = {}
    for name, peak in (("loud", 0.5), ("quiet", 0.01)):
        clip = sndfile_bytes(voiced(24_000, 2.0, peak=peak), 24_000, subtype="FLOAT")
        client.register(f"as {name}", clip, ref_text=SPOKEN)
        samples = np.frombuffer(audio(client.speak(TEXT, voice=f"as {name}")), "<i2")
        levels[name] = np.sqrt(np.mean(samples.astype(np.float64) ** 2))
    assert levels["quiet"] < levels["loud"] / 5


def test_what_there_is_none_of_is_said_in_one_sentence(client, make_clip):
    client.register("plain", make_clip(), ref_text=SPOKEN)
    events = client.speak(TEXT, voice="plain", stream_format="sse")
    assert "stream_format" in message(events)
    whole = client.speak(TEXT, voice="plain", stream=False, stream_format=None)
    assert audio(whole) == audio(client.speak(TEXT, voice="plain"))
    body = {"items": [{"input": TEXT}], "voice": "plain"}
    batch = client.http.post("/v1/audio/speech/batch", json=body)
    assert batch.status_code == 400 and "Batch" in batch.text
    assert "control token" in message(client.speak("<|text_end|>Hello."))
    path = "/v1/audio/speech/stream"
    with connect(str(client.http.base_url.copy_with(scheme="ws", path=path))) as socket:
        answer = json.loads(socket.recv(timeout=30))
    said = "Streaming speech is not available"  # the host's, of any diffusion model
    assert answer == {"type": "error", "message": said}


@pytest.fixture
def servers(family, checkpoint, tmp_path):
    servers = Servers(family, checkpoint, tmp_path)
    yield servers
    servers.stop()


@pytest.mark.long  # a server of its own; test_worker.py has the same of the pipeline
def test_of_a_batch_only_the_one_fails_whose_reference_is_gone(servers, make_clip):
    """Here several requests are computed at once."""
    server, client = servers.start(
        stage_0={"max_num_seqs": 4, "request_batch_max_wait_ms": 200},
        SPEAKER_CACHE_MAX_ENTRIES=1,
    )
    for name in ("here", "gone"):
        client.register(name, make_clip(), ref_text=SPOKEN)
        client.precompute(name).raise_for_status()
    audio(client.speak(TEXT, voice="here"))  # which pushes the other out of memory
    sha = client.http.get("/v1/audio/voices/gone").json()["voice"]["audio_sha256"]
    folder = servers.samples_dir / "store" / sha[:2] / sha
    for path in folder.glob("*.safetensors"):
        path.unlink()

    def speak(name):
        own = SpeechClient(server.url)
        spoken = own.speak(TEXT, voice=name)
        own.close()
        return spoken

    with ThreadPoolExecutor(4) as pool:
        spoken = list(pool.map(speak, ["here", "gone", "here", "here"]))
    assert [s.status for s in spoken] == [200, 500, 200, 200]
    assert b"reference audio" in spoken[1].audio
    assert all(s.audio for s in spoken)
    stats = client.stats()["workers"][0]
    assert stats["failed_prompts"] >= 1
    assert stats["encodes"] == dict.fromkeys(FAMILY.encoders, 2)
    assert server.is_healthy()
