"""States of voices in a decoder: bounded, by content, and gone with their voice."""

import pytest

from tests.waiting import Clock
from vllm_tts_cache.model_executor.decoder_states import (
    DELETED_SECONDS,
    DecoderState,
    DecoderStates,
)

A, B, C = "a" * 64, "b" * 64, "c" * 64


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def states(clock):
    return DecoderStates(100, clock)


def get(states, sha, digest="d", size=40):
    """Whether it was there."""
    made = []

    def make():
        made.append(1)
        return DecoderState(f"{sha}{digest}", size)

    assert states.get(sha, digest, make) == f"{sha}{digest}"
    return not made


def test_a_state_is_made_once_for_what_it_is_made_of(states):
    assert [get(states, A), get(states, A)] == [False, True]
    assert [get(states, A, "e"), get(states, A, "e")] == [False, True]
    assert states.stats(0).made == states.stats(0).hits == 2


def test_the_one_that_was_used_longest_ago_goes(states):
    get(states, A)
    get(states, B)
    assert get(states, A)
    get(states, C)
    assert get(states, A) and get(states, C)
    assert not get(states, B)
    counts = states.stats(0)
    assert (counts.states, counts.bytes, counts.evictions) == (2, 80, 2)


def test_one_that_is_larger_than_all_may_be_pushes_nobody_out(states):
    get(states, A)
    assert [get(states, B, size=101), get(states, B, size=101)] == [False, False]
    assert get(states, A)


def test_the_state_of_an_inline_reference_is_not_kept(states):
    assert [get(states, None), get(states, None)] == [False, False]
    assert states.stats(0).states == 0


def test_what_is_deleted_is_kept_no_more(states):
    get(states, A)
    get(states, A, "e")
    get(states, B, size=10)
    assert states.delete([A, C]).num_entries == 2
    # A request that had its prompt comes afterwards.
    assert [get(states, A), get(states, A)] == [False, False]
    assert get(states, B, size=10)
    assert states.stats(0).bytes == 10


def test_where_all_is_deleted_nothing_is_kept_for_a_while(states, clock):
    get(states, A)
    assert states.delete_all().num_entries == 1
    assert [get(states, B), get(states, B)] == [False, False]
    assert states.stats(0).bytes == 0
    clock.now += DELETED_SECONDS
    assert [get(states, B), get(states, B)] == [False, True]


def test_what_is_deleted_for_now_may_be_kept_again_and_else_not(states):
    get(states, A)
    states.delete([B])
    assert states.delete_all_for_now() == 1
    assert (states.stats(0).states, states.stats(0).bytes) == (0, 0)
    assert [get(states, A), get(states, A)] == [False, True]
    assert [get(states, B), get(states, B)] == [False, False]


def test_a_voice_that_is_registered_again_is_kept_after_a_while(states, clock):
    states.delete([A])
    clock.now += DELETED_SECONDS - 1
    states.delete([B])
    assert [get(states, A), get(states, A)] == [False, False]
    clock.now += 1
    assert [get(states, A), get(states, A)] == [False, True]
    assert [get(states, B), get(states, B)] == [False, False]


def test_of_too_many_at_once_nobody_knows_which_they_were(states, clock):
    states.delete([A])
    states.delete([f"{number:064x}" for number in range(4096)])
    assert [get(states, A), get(states, B), get(states, B)] == [False] * 3
    clock.now += DELETED_SECONDS
    assert [get(states, A), get(states, A), get(states, B)] == [False, True, False]
