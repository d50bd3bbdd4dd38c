"""What every tier promises. A new tier is added to the fixture and nothing else."""

import threading

import numpy as np
import pytest

from tests.encoding_samples import (
    INLINE,
    REGISTERED,
    ROOMY,
    assert_same,
    make_encoding,
    make_key,
    sized_encoding,
)
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.keys import Segment
from vllm_tts_cache.store.tiers.base import Budget
from vllm_tts_cache.store.tiers.disk import DiskTier
from vllm_tts_cache.store.tiers.memory import MemoryTier


@pytest.fixture(params=["memory", "disk"])
def make_tier(request, tmp_path):
    makers = {"memory": MemoryTier, "disk": lambda b: DiskTier(tmp_path, b)}
    return lambda budgets=ROOMY: makers[request.param](budgets)


@pytest.fixture
def tier(make_tier):
    return make_tier()


def held(tier):
    return {s: stats.entries for s, stats in tier.stats().segments.items()}


def test_a_miss_is_none_and_counted(tier):
    assert tier.get(make_key(), REGISTERED) is None
    assert tier.stats().segments[REGISTERED].misses == 1
    assert tier.stats().hits == 0


@pytest.mark.parametrize("segment", Segment)
def test_a_round_trip_is_bit_exact(tier, segment):
    tier.put(make_key(), make_encoding(), segment)
    assert_same(tier.get(make_key(), segment), make_encoding())
    assert tier.stats().segments[segment].hits == 1


@pytest.mark.parametrize("other", [make_key(1, 0), make_key(0, 1)])
def test_any_change_of_identity_is_a_miss(tier, other):
    tier.put(make_key(), make_encoding(), REGISTERED)
    assert tier.get(other, REGISTERED) is None


def test_asking_as_registered_promotes_an_inline_entry(tier):
    tier.put(make_key(), make_encoding(), INLINE)
    assert_same(tier.get(make_key(), REGISTERED), make_encoding())
    assert held(tier) == {REGISTERED: 1, INLINE: 0}


def test_putting_as_registered_promotes_an_inline_entry(tier):
    tier.put(make_key(), make_encoding(), INLINE)
    tier.put(make_key(), make_encoding(), REGISTERED)
    assert held(tier) == {REGISTERED: 1, INLINE: 0}


def test_inline_use_leaves_a_registered_entry_registered(tier):
    tier.put(make_key(), make_encoding(), REGISTERED)
    tier.put(make_key(), make_encoding(), INLINE)
    assert_same(tier.get(make_key(), INLINE), make_encoding())
    assert held(tier) == {REGISTERED: 1, INLINE: 0}


def test_promote_tells_whether_something_moved(tier):
    assert tier.promote(make_key()) is False
    tier.put(make_key(), make_encoding(), INLINE)
    assert (tier.promote(make_key()), tier.promote(make_key())) == (True, False)
    assert held(tier) == {REGISTERED: 1, INLINE: 0}


@pytest.mark.parametrize("segment", Segment)
def test_contains_neither_moves_nor_counts(tier, segment):
    assert tier.contains(make_key()) is False
    tier.put(make_key(), make_encoding(), segment)
    assert tier.contains(make_key()) is True
    assert held(tier)[segment] == 1
    assert tier.stats().hits == tier.stats().misses == 0


def test_what_is_too_big_for_registered_stays_inline_and_is_served(make_tier):
    tier = make_tier({REGISTERED: Budget(10), INLINE: Budget(10_000)})
    tier.put(make_key(), make_encoding(), INLINE)
    assert_same(tier.get(make_key(), REGISTERED), make_encoding())
    assert held(tier) == {REGISTERED: 0, INLINE: 1}


@pytest.mark.parametrize("budget", [Budget(0), Budget(10), Budget(1 << 20, 0)])
def test_what_can_never_fit_is_skipped(make_tier, budget):
    tier = make_tier(dict.fromkeys(Segment, budget))
    tier.put(make_key(), sized_encoding(11), REGISTERED)
    assert tier.get(make_key(), REGISTERED) is None
    assert (tier.stats().entries, tier.stats().evictions) == (0, 0)


def test_inline_entries_never_evict_registered_ones(make_tier):
    tier = make_tier({REGISTERED: Budget(4000, 2), INLINE: Budget(4000, 2)})
    for n in range(2):
        tier.put(make_key(n), make_encoding(n), REGISTERED)
    for n in range(2, 12):
        tier.put(make_key(n), make_encoding(n), INLINE)
    assert all(tier.get(make_key(n), REGISTERED) is not None for n in range(2))
    stats = tier.stats().segments
    assert stats[REGISTERED].evictions == 0
    assert stats[INLINE].evictions == 10 - stats[INLINE].entries > 0


def test_delete_removes_one_encoding_of_an_audio(tier):
    for encoder in range(2):
        tier.put(make_key(0, encoder), make_encoding(), REGISTERED)
    assert (tier.delete(make_key(0, 0)), tier.delete(make_key(0, 0))) == (True, False)
    assert tier.get(make_key(0, 1), REGISTERED) is not None


def test_forget_removes_all_encoders_and_segments_of_one_audio(tier):
    tier.put(make_key(0, 0), make_encoding(), REGISTERED)
    tier.put(make_key(0, 1), make_encoding(), INLINE)
    tier.put(make_key(1, 0), make_encoding(), REGISTERED)
    audio = make_key(0).audio_sha256
    assert (tier.forget(audio), tier.forget(audio)) == (2, 0)
    assert held(tier) == {REGISTERED: 1, INLINE: 0}
    assert tier.stats().evictions == 0
    tier.put(make_key(0, 0), make_encoding(), REGISTERED)
    assert tier.get(make_key(0, 0), REGISTERED) is not None


def test_what_is_served_cannot_be_changed(tier):
    given = np.zeros(4, np.float32)
    tier.put(make_key(), Encoding({"x": given}), REGISTERED)
    given[:] = 7
    got = tier.get(make_key(), REGISTERED)
    with pytest.raises(ValueError, match="read-only"):
        got["x"][0] = 7
    assert got["x"].tolist() == [0, 0, 0, 0]


def test_threads_that_put_get_and_forget_one_audio_never_see_an_error(tier):
    errors = []

    def work(encoder):
        try:
            for n in range(60):
                segment = (REGISTERED, INLINE)[n % 2]
                tier.put(make_key(0, encoder), make_encoding(encoder), segment)
                if (got := tier.get(make_key(0, encoder), REGISTERED)) is not None:
                    assert_same(got, make_encoding(encoder))
                if n % 3 == encoder % 3:
                    tier.forget(make_key(0).audio_sha256)
        except Exception as exc:  # noqa: BLE001
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    tier.forget(make_key(0).audio_sha256)
    assert tier.get(make_key(0), INLINE) is None
