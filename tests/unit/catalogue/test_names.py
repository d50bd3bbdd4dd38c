import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tts_cache.catalogue.names import (
    MAX_LOOKED_UP_CHARS,
    MAX_NAME_CHARS,
    clean,
    clean_new,
    fold,
    is_storable,
    keys_of,
)
from vllm_tts_cache.errors import InvalidSpeakerError

MARKS = [*map(chr, range(0x300, 0x370)), "\u1fbe", "ǰ", "ᾳ", "İ"]


@pytest.mark.parametrize(
    ("one", "other", "is_one"),
    [
        ("Alice", "  aLICE\n", True),
        ("Zoë", unicodedata.normalize("NFD", "zOË"), True),
        ("Straße", "STRASSE", True),
        ("ΣΊΣΥΦΟΣ", "σίσυφος", True),
        ("ana", "anna", False),
        ("é", "e", False),
        ("a b", "ab", False),
    ],
)
def test_names_that_read_alike_fold_alike_and_no_others(one, other, is_one):
    assert (fold(one) == fold(other)) is is_one


def test_folding_any_character_twice_changes_nothing():
    for code in range(sys.maxunicode + 1):
        assert fold(fold(chr(code))) == fold(chr(code))


def test_what_nobody_can_be_called_is_not_composed():
    """It takes the square of a run of marks, and everybody waits for it."""
    text = "e" + 2_500 * "\u0301\u0327"
    assert fold(text) == fold(fold(text)) == text
    assert keys_of(f" {MAX_LOOKED_UP_CHARS * 'a'} ")
    assert not keys_of("a" + MAX_LOOKED_UP_CHARS * "a")


@given(st.text(st.one_of(st.characters(), st.sampled_from(MARKS))))
def test_folding_any_text_twice_changes_nothing(text):
    assert fold(fold(text)) == fold(text)


@pytest.mark.parametrize(
    "name",
    [
        *("Ana María", "王小明", "नमस्ते", "👩‍🚀", "👩🏽‍🚀", "❤️"),
        *("🏳️‍🌈", "ශ්‍රී", ".hidden", "v1.0#?%&", "default voice"),
    ],
)
def test_a_valid_name_is_shown_as_given_without_outer_space(name):
    assert clean(f" {name}\t") == name
    assert clean_new(f" {name}\t") == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "  ", "a/b", "a\\b", ".", " .. ", "a\0b", "a\nb", "a\u2028b"),
        *("\u200b", "\ud800", "x" * (MAX_NAME_CHARS + 1)),
    ],
)
def test_a_name_that_breaks_urls_or_logs_is_refused(name):
    for check in (clean, clean_new):
        with pytest.raises(InvalidSpeakerError) as caught:
            check(name)
        assert caught.value.field == "name"


@pytest.mark.parametrize(
    "name",
    [
        *("admin\u200b", "ad\u200cmin", "ad\u200dmin", "\u200dadmin", "🚀\u200d"),
        *("admin\ufe0f", "ad\u00admin", "\u202enimda", "a\u2066b\u2069", "a\u061cb"),
        *("\ufeffadmin", "admin\U000e0041", "admin\u034f", "admin\u3164"),
        "admin\u2800",
    ],
)
def test_a_new_name_that_looks_like_another_is_refused_but_an_old_one_stays(name):
    with pytest.raises(InvalidSpeakerError, match=r"invisible character U\+") as caught:
        clean_new(name)
    assert caught.value.field == "name"
    assert clean(name) == name


def test_no_invisible_format_character_gets_into_a_new_name():
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code)) == "Cf":
            with pytest.raises(InvalidSpeakerError):
                clean_new(f"a{chr(code)}b")


@pytest.mark.parametrize("name", ["default", " Default\t", "DEFAULT"])
def test_the_placeholder_of_clients_without_a_voice_is_no_new_name(name):
    with pytest.raises(InvalidSpeakerError, match="OpenAI clients"):
        clean_new(name)
    assert clean(name) == name.strip()


def test_half_a_character_is_not_storable():
    assert not is_storable("a\udc80")
    assert is_storable("a𝄞")
