"""What becomes of one voice on a server that goes on: precomputed, forced, damaged."""

import pytest

from vllm_tts_cache.testing.server import data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.every_family]


def test_encoded_anew_or_without_a_clip_it_is_alike(client, shared_server, make_clip):
    client.register("forced", make_clip(), ref_text="Hello there.")
    client.precompute("forced")
    first, encodes = client.speak(voice="forced"), client.encodes()
    answer = client.http.post("/v1/audio/voices/forced/cache?force=true").json()
    assert answer == {"voice": "forced", "cache_status": "ready"}
    assert client.encodes() == {name: n + 1 for name, n in encodes.items()}
    assert client.speak(voice="forced").audio == first.audio
    sha = client.http.get("/v1/audio/voices/forced").json()["voice"]["audio_sha256"]
    stored = shared_server.options.samples_dir / "store" / sha[:2] / sha
    (stored / "audio.safetensors").unlink()
    again = client.speak(voice="forced")
    assert (again.status, again.audio) == (200, first.audio)
    client.http.delete("/v1/audio/voices/forced")


@pytest.mark.does("keeps_decoder_states")
def test_inline_references_leave_no_state_and_sound_alike(client, make_clip):
    def decoder():
        (stats,) = client.stats()["decoders"]
        del stats["rpc_calls"]  # looking is one as well
        return stats

    clip, words = make_clip(7.0), {"ref_text": "Hello there."}
    client.register("Bea", clip, **words).raise_for_status()
    before = decoder()
    by_vector = client.speak(ref_audio=data_url(clip), x_vector_only_mode=True)
    assert by_vector.status == 200
    assert decoder() == before, "an x-vector needs none"
    inline = client.speak(ref_audio=data_url(clip), **words)
    assert decoder()["states"] == before["states"]
    assert inline.audio == client.speak(voice="Bea").audio
    client.http.delete("/v1/audio/voices/Bea").raise_for_status()


@pytest.mark.does("raw_embeddings")
def test_a_raw_embedding_speaks_the_same_registered_and_in_the_request(client):
    values = [0.01 * (i % 7 - 3) for i in range(128)]
    form = {"name": "raw", "consent": "c", "speaker_embedding": str(values)}
    assert client.http.post("/v1/audio/voices", data=form).status_code == 200
    assert client.precompute("raw").json()["cache_status"] == "ready"
    registered = client.speak(voice="raw")
    given = client.speak(speaker_embedding=values, task_type="Base")
    assert (registered.status, registered.audio) == (200, given.audio)
