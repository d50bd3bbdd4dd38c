"""How a request on VoxCPM2 is cloned."""

import json

import pytest

from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.voxcpm2.family import CONTINUATION, FAMILY, REFERENCE
from vllm_tts_cache.speaker.modes import CloneFacts


@pytest.mark.parametrize("stored", [False, True])
def test_a_transcript_in_the_request_continues_and_a_stored_one_does_not(stored):
    """As the host: a voice sounds as it did before it had a transcript."""
    asked = CloneFacts(given_transcript=True, stored_transcript=stored)
    assert FAMILY.mode(asked) is CONTINUATION
    assert FAMILY.mode(CloneFacts(stored_transcript=stored)) is REFERENCE
    assert FAMILY.mode(CloneFacts(is_inline=True)) is REFERENCE


def test_a_request_may_name_the_mode():
    facts = CloneFacts(stored_transcript=True, named="continuation")
    assert FAMILY.mode(facts) is CONTINUATION
    facts = CloneFacts(given_transcript=True, named="reference")
    assert FAMILY.mode(facts) is REFERENCE
    with pytest.raises(InvalidSpeakerError, match="'reference' needs none"):
        FAMILY.mode(CloneFacts(named="continuation"))


def test_a_voice_with_a_transcript_is_precomputed_for_both_modes():
    assert FAMILY.precomputed(has_transcript=False) == ("reference",)
    assert FAMILY.precomputed(has_transcript=True) == ("reference", "continuation")


@pytest.mark.parametrize(
    ("config", "is_of_it"),
    [
        ({"architecture": "voxcpm2"}, True),
        ({"architecture": "voxcpm"}, False),
        ({"model_type": "qwen3_tts"}, False),
        ([], False),
    ],
)
def test_a_checkpoint_is_known_by_its_architecture(tmp_path, config, is_of_it):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert FAMILY.recognises(tmp_path) is is_of_it
