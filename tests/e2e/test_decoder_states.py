"""A voice's state in the codec decoder: made once, shown, and gone with its voice."""

import pytest

from vllm_tts_cache.testing.server import data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SPOKEN = "Hello there."


def decoder_of(client):
    (stats,) = client.stats()["decoders"]
    del stats["rpc_calls"]  # looking is one as well
    return stats


def test_inline_references_leave_none_and_sound_alike(client, make_clip):
    clip = make_clip(7.0)
    client.register("Bea", clip, ref_text=SPOKEN).raise_for_status()
    before = decoder_of(client)
    by_vector = client.speak(ref_audio=data_url(clip), x_vector_only_mode=True)
    assert by_vector.status == 200
    assert decoder_of(client) == before, "an x-vector needs none"
    inline = client.speak(ref_audio=data_url(clip), ref_text=SPOKEN)
    assert decoder_of(client)["states"] == before["states"]
    assert inline.audio == client.speak(voice="Bea").audio
    client.http.delete("/v1/audio/voices/Bea").raise_for_status()
