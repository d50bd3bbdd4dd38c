import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tts_cache.catalogue.names import MAX_NAME_CHARS, clean, fold, is_storable
from vllm_tts_cache.errors import InvalidSpeakerError

MARKS = [chr(code) for code in range(0x300, 0x370)] + [
    "\u1fbe",
    "\u0345",
    "ǰ",
    "ᾳ",
    "İ",
]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Alice", "  aLICE\n"),
        ("Zoë", unicodedata.normalize("NFD", "zOË")),
        ("Straße", "STRASSE"),
        ("ΣΊΣΥΦΟΣ", "σίσυφος"),
    ],
)
def test_names_that_read_alike_fold_alike(one, other):
    assert fold(one) == fold(other)


@pytest.mark.parametrize(("one", "other"), [("ana", "anna"), ("é", "e"), ("a b", "ab")])
def test_different_names_stay_different(one, other):
    assert fold(one) != fold(other)


def test_folding_any_character_twice_changes_nothing():
    for code in range(sys.maxunicode + 1):
        assert fold(fold(chr(code))) == fold(chr(code))


@given(st.text(st.one_of(st.characters(), st.sampled_from(MARKS))))
def test_folding_any_text_twice_changes_nothing(text):
    assert fold(fold(text)) == fold(text)


@pytest.mark.parametrize(
    "name", ["Ana María", "王小明", "नमस्ते", "👩‍🚀", ".hidden", "v1.0#?%&"]
)
def test_a_valid_name_is_shown_as_given_without_outer_space(name):
    assert clean(f" {name}\t") == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "  ",
        "a/b",
        "a\\b",
        ".",
        " .. ",
        "a\0b",
        "a\nb",
        "a\u2028b",
        "\u200b",
        "\ud800",
        "x" * (MAX_NAME_CHARS + 1),
    ],
)
def test_a_name_that_breaks_urls_or_logs_is_refused(name):
    with pytest.raises(InvalidSpeakerError) as caught:
        clean(name)
    assert caught.value.field == "name"


def test_half_a_character_is_not_storable():
    assert not is_storable("a\udc80")
    assert is_storable("a𝄞")
