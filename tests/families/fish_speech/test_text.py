"""Texts for Fish Speech: the host's rules, and no text that keeps a server busy."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm_omni.model_executor.models.fish_speech.prompt_utils import (
    normalize_fish_speech_text,
)

from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.fish_speech.prompt import (
    checked_text,
    control_tokens,
    transcript,
)

# What makes up a control token, a tag in either spelling, or nearly one.
PIECES = [
    *("<|", "|>", "<", ">", "|", ":", "\n", " ", "a", "é", "7", "\u0663"),
    *("<|speaker:0|>", "<speaker:12>", "<speaker:>", "<|speaker:|>", "speaker:1"),
    *("<|phoneme_start|>", "<|phoneme_end|>", "<|phoneme_", "<|im_end|>"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def hosts(text, **options):
    try:
        return normalize_fish_speech_text(text, **options)
    except ValueError:
        return None


def ours(text):
    try:
        return checked_text("input", text)
    except InvalidSpeakerError:
        return None


@settings(max_examples=2000)
@given(text=TEXTS | st.text("<|>:a0speakr\n", max_size=30) | st.text(max_size=30))
@example("<|" * 5)
def test_a_text_passes_where_it_passes_at_the_host_and_is_the_same_then(text):
    assert ours(text) == hosts(text)


@settings(max_examples=500)
@given(text=TEXTS.filter(lambda text: ours(text) is not None))
def test_a_transcript_is_read_as_the_host_reads_it(text):
    assert transcript(text) == hosts(text, add_default_speaker=True)
    assert transcript(checked_text("ref_text", text)) == transcript(text)


def test_a_text_longer_than_the_model_could_ever_speak_is_refused():
    assert checked_text("input", "a" * 65_536) == "a" * 65_536
    with pytest.raises(InvalidSpeakerError, match="65537 characters") as raised:
        checked_text("input", "a" * 65_537)
    assert raised.value.field == "input"


def test_openings_that_cost_the_host_a_walk_each_are_few():
    text = "<|a " * 16
    assert checked_text("input", text) == text == hosts(text)
    with pytest.raises(InvalidSpeakerError, match="begins no tag"):
        checked_text("input", text + "<|")


HOSTILE = {
    "openings": "<|",
    "openings and text": "<|aaaaaaaa",
    "half speakers": "<|speaker:",
    "half old speakers": "<speaker:1",
    "long numbers": "<speaker:" + "1" * 1000,
    "tags": "<|speaker:0|>",
    "old tags": "<speaker:0>",
    "tokens": "<|x|>",
    "closings": "|>",
}


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
def test_a_long_text_is_read_once(unit):
    control_tokens(unit * (10**6 // len(unit)))  # twice would take minutes


def test_each_clip_has_a_speaker_by_its_number_unless_it_names_one():
    """As ``generate_long`` of fish-speech tags its prompts."""
    lines = ["Hello.", "<|speaker:7|>There.", "<speaker:3>Now.", "And then."]
    assert transcript("\n".join(lines), 4).split("\n") == [
        "<|speaker:0|>Hello.",
        "<|speaker:7|>There.",
        "<|speaker:3|>Now.",
        "<|speaker:3|>And then.",
    ]
