"""A voice's state in the codec decoder: made once, shown, and gone with its voice."""

import pytest

from vllm_tts_cache.testing.client import data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SPOKEN = "Hello there."


def decoder_of(client):
    (stats,) = client.stats()["decoders"]
    del stats["rpc_calls"]  # looking is one as well
    return stats


def test_a_voice_has_one_state_until_it_is_deleted(client, make_clip):
    client.register("Ada", make_clip(7.0), ref_text=SPOKEN).raise_for_status()
    before = decoder_of(client)
    first, second = (client.speak(voice="Ada") for _ in range(2))
    assert (first.status, second.status) == (200, 200)
    assert first.audio == second.audio
    after = decoder_of(client)
    assert after["made"] == before["made"] + 1
    assert after["hits"] == before["hits"] + 1
    assert after["states"] == before["states"] + 1
    assert 0 < after["bytes"] <= after["max_bytes"]
    assert client.http.delete("/v1/audio/voices/Ada").status_code == 200
    gone = decoder_of(client)
    assert (gone["states"], gone["bytes"]) == (before["states"], before["bytes"])


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
