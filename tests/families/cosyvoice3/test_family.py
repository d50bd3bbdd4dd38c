"""How a request on CosyVoice3 is cloned, and of which checkpoint and clip."""

import json

import pytest

from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.cosyvoice3.family import (
    CROSS_LINGUAL,
    FAMILY,
    INSTRUCT,
    ZERO_SHOT,
)
from vllm_tts_cache.speaker.modes import CloneFacts


def test_a_transcript_makes_it_zero_shot_wherever_it_is_from():
    assert FAMILY.mode(CloneFacts(given_transcript=True)) is ZERO_SHOT
    assert FAMILY.mode(CloneFacts(stored_transcript=True)) is ZERO_SHOT
    assert FAMILY.mode(CloneFacts(given_transcript=True, is_inline=True)) is ZERO_SHOT


def test_a_voice_without_a_transcript_is_cloned_across_languages():
    assert FAMILY.mode(CloneFacts()) is CROSS_LINGUAL


def test_inline_audio_without_a_transcript_is_refused_as_by_stock():
    """Unless the request says that it means it."""
    with pytest.raises(InvalidSpeakerError, match="'cross_lingual' needs none"):
        FAMILY.mode(CloneFacts(is_inline=True))
    meant = CloneFacts(is_inline=True, named="cross_lingual")
    assert FAMILY.mode(meant) is CROSS_LINGUAL


@pytest.mark.parametrize("mode", FAMILY.modes, ids=lambda mode: mode.name)
def test_a_request_may_name_the_mode(mode):
    assert FAMILY.mode(CloneFacts(stored_transcript=True, named=mode.name)) is mode


def test_zero_shot_needs_a_transcript():
    with pytest.raises(InvalidSpeakerError, match="ref_text"):
        FAMILY.mode(CloneFacts(named="zero_shot"))


def test_a_voice_is_encoded_once_for_all_modes():
    assert {mode.encoders for mode in FAMILY.modes} == {FAMILY.encoders}
    assert INSTRUCT in FAMILY.modes
    for has_transcript in (False, True):
        found = FAMILY.precomputed(has_transcript=has_transcript)
        assert found == ("speech_tokens", "mel", "speaker")


@pytest.mark.parametrize(
    ("num_samples", "rate_hz", "says"),
    [
        (30 * 16_000, 16_000, None),
        (30 * 48_000, 48_000, None),
        (30 * 16_000 + 1, 16_000, "30 s at most"),
        (16_000, 15_999, "16000 Hz or more"),
        (8_000, 8_000, "16000 Hz or more"),
    ],
)
def test_clips_that_the_official_code_refuses_are_refused(num_samples, rate_hz, says):
    problem = FAMILY.limits.problem(num_samples, rate_hz)
    assert (problem is None) is (says is None)
    assert says is None or (problem and says in problem)


@pytest.mark.parametrize(
    ("files", "is_of_it"),
    [
        ({"config.json": {}, "cosyvoice3.yaml": {}}, True),
        ({"config.json": {}, "speech_tokenizer_v3.onnx": {}}, True),
        ({"config.json": {"model_type": "cosyvoice3"}}, True),
        ({"config.json": {}}, False),
        ({"config.json": {}, "speech_tokenizer_v2.onnx": {}}, False),
        ({"config.json": {}, "cosyvoice2.yaml": {}}, False),
        ({"config.json": {"model_type": "qwen3_tts"}}, False),
        ({}, False),
    ],
)
def test_a_checkpoint_is_known_by_its_own_files(tmp_path, files, is_of_it):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert FAMILY.recognises(tmp_path) is is_of_it


def test_the_failure_id_is_no_code_and_no_end():
    first_code, num_codes, end = 0, 6_561, 6_562
    assert FAMILY.failure_id not in (*range(first_code, num_codes), end)
    assert FAMILY.failure_id == 6_760
