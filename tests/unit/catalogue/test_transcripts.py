"""Transcripts of several clips: a line for each, however a form gives them."""

import pytest

from vllm_tts_cache.catalogue.details import joined, of_clips
from vllm_tts_cache.errors import InvalidSpeakerError


@pytest.mark.parametrize("text", ("one", "one\ntwo", " \n", "a\r\n\n b", None))
def test_the_transcript_of_one_clip_stays_as_it_was_written(text):
    assert of_clips(text, 1) == text


@pytest.mark.parametrize(
    ("text", "kept"),
    (
        ("one\ntwo", "one\ntwo"),
        ("  one \r\n\r\n two\n", "one\ntwo"),
        ("one\rtwo", "one\ntwo"),
        ("one\u2028a\ntwo\x0b", "one\u2028a\ntwo"),  # ends no line in an editor
        (" \n ", None),
        (None, None),
    ),
)
def test_several_clips_have_a_line_each(text, kept):
    assert of_clips(text, 2) == kept


@pytest.mark.parametrize(
    ("text", "said"),
    (("one", "1 line, .* 2 clips"), ("a\nb\nc", "3 lines, .* 2 clips")),
)
def test_another_number_of_lines_is_refused_with_both_numbers(text, said):
    with pytest.raises(InvalidSpeakerError, match=said):
        of_clips(text, 2)


@pytest.mark.parametrize(
    ("given", "kept"),
    (
        (["one\ntwo"], "one\ntwo"),
        (["one", "two"], "one\ntwo"),
        (["one\r\nand more", " two "], "one and more\ntwo"),
        (["", " "], None),
        ([], None),
    ),
)
def test_a_form_gives_it_once_or_once_for_each_clip(given, kept):
    assert joined(given, 2) == kept


def test_one_clip_keeps_its_line_breaks():
    assert joined([" one\ntwo "], 1) == "one\ntwo"


@pytest.mark.parametrize(
    ("given", "num_clips", "said"),
    (
        (["a", "b", "c"], 2, "given 3 times, and there are 2 clips"),
        (["a", "b"], 1, "given 2 times, and there is 1 clip;"),
        (["a", ""], 2, "1 line, .* 2 clips"),
    ),
)
def test_a_form_that_gives_it_another_number_of_times_is_refused(
    given, num_clips, said
):
    with pytest.raises(InvalidSpeakerError, match=said):
        joined(given, num_clips)
