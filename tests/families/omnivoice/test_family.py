"""How a request on OmniVoice is cloned, and what its texts become."""

import json

import pytest

from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.omnivoice.family import FAMILY, IN_CONTEXT
from vllm_tts_cache.families.omnivoice.texts import check_text, with_full_stop
from vllm_tts_cache.speaker.family import family_of_model, family_of_pipeline
from vllm_tts_cache.speaker.modes import CloneFacts


@pytest.mark.parametrize("is_inline", [False, True])
def test_a_clone_needs_a_transcript_and_says_so(is_inline):
    """The official package has Whisper write one, which is not served here."""
    with pytest.raises(InvalidSpeakerError, match="Give ref_text") as refused:
        FAMILY.mode(CloneFacts(is_inline=is_inline))
    assert refused.value.field == "ref_text"
    for facts in (
        CloneFacts(given_transcript=True, is_inline=is_inline),
        CloneFacts(stored_transcript=True),
    ):
        assert FAMILY.mode(facts) is IN_CONTEXT


@pytest.mark.parametrize("architecture", ["OmniVoicePipeline", "OmniVoice"])
def test_its_pipeline_is_known_by_both_names_and_is_no_talker(architecture):
    assert family_of_pipeline(architecture) is FAMILY
    assert family_of_model(architecture) is None


@pytest.mark.parametrize("architecture", ["WanPipeline", "", None])
def test_another_pipeline_is_of_no_family(architecture):
    assert family_of_pipeline(architecture) is None


@pytest.mark.parametrize(
    ("config", "is_of_it"),
    [
        ({"model_type": "omnivoice", "architectures": ["OmniVoice"]}, True),
        ({"model_type": "qwen3"}, False),
        ({}, False),
        ([], False),
    ],
)
def test_a_checkpoint_is_known_by_its_model_type(tmp_path, config, is_of_it):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert FAMILY.recognises(tmp_path) is is_of_it


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Hello there", "Hello there."),
        (" Hello there. ", "Hello there."),
        ("Is it?", "Is it?"),
        ("(aside)", "(aside)"),
        ("你好", "你好。"),
        ("你好\uff01", "你好\uff01"),
        ("Grüße…", "Grüße…"),
        ("and a dash -", "and a dash -."),
        ("", ""),
        ("  ", ""),
    ],
)
def test_a_transcript_ends_as_a_sentence_does(given, expected):
    """The official function is asked beside ours in ``test_official``."""
    assert with_full_stop(given) == expected


@pytest.mark.parametrize("token", ["<|text_end|>", "<|denoise|>", "<|lang_start|>"])
def test_a_control_token_is_refused_by_name(token):
    with pytest.raises(InvalidSpeakerError) as refused:
        check_text("input", f"Hello {token}there.")
    assert token in str(refused.value)
    check_text("input", "a <b> c, <|laughs|>, [laughter], text_end")
