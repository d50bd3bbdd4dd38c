"""A voice's state in the codec decoder: made once, shown, and gone with its voice."""

import pytest

from vllm_tts_cache.testing.server import data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SPOKEN = "Hello there."


def decoder_of(client):
    (stats,) = client.stats()["decoders"]
    del stats["rpc_calls"]  # looking is one as well
    return stats


def test_an_inline_reference_sounds_alike_and_leaves_none(client, make_clip):
    clip = make_clip(7.0)
    client.register("Bea", clip, ref_text=SPOKEN).raise_for_status()
    before = decoder_of(client)
    inline = client.speak(ref_audio=data_url(clip), ref_text=SPOKEN)
    assert decoder_of(client)["states"] == before["states"]
    assert inline.audio == client.speak(voice="Bea").audio
    client.http.delete("/v1/audio/voices/Bea").raise_for_status()


def test_an_x_vector_needs_none(client, make_clip):
    before = decoder_of(client)
    spoken = client.speak(ref_audio=data_url(make_clip()), x_vector_only_mode=True)
    assert spoken.status == 200
    assert decoder_of(client) == before
