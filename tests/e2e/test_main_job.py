"""Register once, precompute, speak, restart, speak again: one encode per encoder."""

import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes, voiced
from vllm_tts_cache.testing.client import data_url
from vllm_tts_cache.testing.families import FISH_SPEECH, QWEN3_TTS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.families(QWEN3_TTS, FISH_SPEECH),
]

TEXT = "Hello world, this is a test."


def test_a_voice_is_encoded_once_in_its_life(family, make_server, storage):
    # Integers, since encoders round what is not one each in their own way.
    samples = (voiced(44_100, 3.3) * 2**23).astype(np.int32) * 256
    wav = sndfile_bytes(samples, 44_100, subtype="PCM_24")
    flac = sndfile_bytes(samples, 44_100, "FLAC", "PCM_24")
    server, client = make_server()

    assert client.register("Ada", wav, ref_text="Hello there.").status_code == 200
    assert client.precompute("ada").json() == {"voice": "Ada", "cache_status": "ready"}
    again = client.precompute("ADA ").json()
    assert again["cache_status"] == "ready" and "already exists" in again["message"]

    before = [client.speak(TEXT, voice="Ada") for _ in range(5)]
    assert [(s.status, s.cache) for s in before] == [(200, "hit")] * 5
    client.register("Ada's twin", flac, ref_text="Hello there.")
    twin = client.speak(TEXT, voice="Ada's twin")
    inline = client.speak(
        TEXT, ref_audio=data_url(flac), ref_text="Hello there.", task_type="Base"
    )
    x_vectors = [x_vector(family, client)]
    assert client.encodes() == dict.fromkeys(family.encoders, 1)
    server.stop()

    _, client = make_server()
    after = [client.speak(TEXT, voice="Ada") for _ in range(5)]
    x_vectors.append(x_vector(family, client))
    assert client.encodes() == dict.fromkeys(family.encoders, 0)
    assert [(s.status, s.cache) for s in after] == [(200, "hit")] * 5
    workers = client.stats()["workers"]
    assert sum(w["in_place_encodes"] + w["failed_prompts"] for w in workers) == 0

    heard = {s.audio for s in (*before, twin, inline, *after)}
    assert len(heard) == 1 and len(before[0].audio) > 0
    assert len(set(x_vectors)) == 1 and heard.isdisjoint(x_vectors)
    assert storage.verify() == []


def x_vector(family, client):
    """What an x-vector clone sounds like; a family without the mode says so."""
    spoken = client.speak(TEXT, voice="Ada", x_vector_only_mode=True)
    if family.family.clones_from_embeddings:
        assert (spoken.status, spoken.cache) == (200, "hit")
    else:
        assert spoken.status == 400 and b"x_vector_only_mode" in spoken.audio
    return spoken.audio


def test_forced_precompute_encodes_again_to_the_same_bits(client, make_clip):
    client.register("forced", make_clip(), ref_text="Hello there.")
    client.precompute("forced")
    first, encodes = client.speak(voice="forced"), client.encodes()
    answer = client.precompute("forced", force=True).json()
    assert answer == {"voice": "forced", "cache_status": "ready"}
    assert client.encodes() == {name: n + 1 for name, n in encodes.items()}
    assert client.speak(voice="forced").audio == first.audio


def test_registering_precomputes_in_the_background(client, make_clip):
    import time

    client.register("early", make_clip(), ref_text="Hello.", precompute="true")
    until = time.monotonic() + 60
    while (status := client.http.get("/v1/audio/voices/early/cache").json())[
        "cache_status"
    ] != "ready":
        assert status["cache_status"] in ("pending", "processing")
        assert time.monotonic() < until
        time.sleep(0.05)
    assert client.speak(voice="early").cache == "hit"


def test_removing_the_stored_audio_does_not_silence_a_precomputed_voice(
    client, shared_server, make_clip
):
    client.register("kept", make_clip(), ref_text="Hello there.")
    client.precompute("kept")
    sha = client.http.get("/v1/audio/voices/kept").json()["voice"]["audio_sha256"]
    first = client.speak(voice="kept")
    (stored,) = (shared_server.options.samples_dir / "audio").rglob(f"{sha}.*")
    stored.unlink()
    again = client.speak(voice="kept")
    assert (again.status, again.audio) == (200, first.audio)
    client.http.delete("/v1/audio/voices/kept")


@pytest.mark.families(QWEN3_TTS)
def test_a_raw_embedding_speaks_the_same_registered_and_in_the_request(client):
    values = [0.01 * (i % 7 - 3) for i in range(128)]
    form = {"name": "raw", "consent": "c", "speaker_embedding": str(values)}
    assert client.http.post("/v1/audio/voices", data=form).status_code == 200
    assert client.precompute("raw").json()["cache_status"] == "ready"
    registered = client.speak(voice="raw")
    given = client.speak(speaker_embedding=values, task_type="Base")
    assert (registered.status, registered.audio) == (200, given.audio)
