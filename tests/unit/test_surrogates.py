"""Half a character is refused by its field's name, or joined with its other half."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tts_cache.entrypoints.http.limits import Pieces, refuse_halves
from vllm_tts_cache.errors import InvalidSpeakerError

HALF, OTHER_HALF = "\ud83d", "\ude00"


def test_a_name_is_shown_in_part_however_deep_and_long_it_is():
    said = HALF
    for _ in range(200):
        said = {"k" * 10_000: said}
    with pytest.raises(InvalidSpeakerError) as refused:
        refuse_halves(said)
    assert len(str(refused.value)) < 400


@given(
    st.recursive(
        st.none() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_whole_characters_are_let_through(said):
    refuse_halves(said)


def pieces(*texts):
    joined = Pieces()
    return "".join(map(joined.feed, texts))


def test_two_halves_make_the_character_and_a_lone_one_is_left_out():
    assert pieces(f"a{HALF}", f"{OTHER_HALF}b") == "a\U0001f600b"
    assert pieces(f"a{HALF}", "", f"{OTHER_HALF}b") == "a\U0001f600b"
    assert pieces(f"a{HALF}", "b") == "ab"
    assert pieces(f"{OTHER_HALF}a{HALF}{HALF}", OTHER_HALF) == "a\U0001f600"
    assert pieces(HALF) == ""


def test_the_end_of_an_utterance_is_no_place_to_wait_for_the_other_half():
    joined = Pieces()
    assert joined.feed(f"a{HALF}") == "a"
    joined.end()
    assert joined.feed(f"{OTHER_HALF}b") == "b"


@given(st.text(), st.data())
def test_text_is_what_it_was_however_it_is_cut(text, data):
    """At UTF-16 units, as those cut it that do it wrongly."""
    units = text.encode("utf-16-le")
    at = data.draw(st.lists(st.integers(0, len(units) // 2)).map(sorted))
    cuts = [0, *(2 * each for each in at), len(units)]
    cut = (units[begin:end] for begin, end in pairwise(cuts))
    assert pieces(*(u.decode("utf-16-le", "surrogatepass") for u in cut)) == text
