import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from tests.encoding_samples import (
    INLINE,
    REGISTERED,
    ROOMY,
    assert_same,
    make_encoding,
    make_key,
)
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.flights import FileFlights
from vllm_tts_cache.store.tiers.base import Budget
from vllm_tts_cache.store.tiers.disk import DiskTier
from vllm_tts_cache.store.tiers.memory import MemoryTier

AUDIO = make_key().audio_sha256


@pytest.fixture
def memory():
    return MemoryTier(ROOMY)


@pytest.fixture
def disk(tmp_path):
    return DiskTier(tmp_path / "encodings", ROOMY)


@pytest.fixture
def cache(tmp_path, memory, disk):
    return EncodingCache([memory, disk], FileFlights(tmp_path / "locks"))


def never():
    raise AssertionError("encoded although it is stored")


def test_a_miss_encodes_into_every_tier(cache, memory, disk):
    made = cache.get_or_encode(make_key(), REGISTERED, make_encoding)
    assert_same(made, make_encoding())
    assert_same(memory.get(make_key(), REGISTERED), made)
    assert_same(disk.get(make_key(), REGISTERED), made)


def test_a_restart_reads_the_disk_once_and_then_memory(tmp_path, cache, disk):
    made = cache.get_or_encode(make_key(), REGISTERED, make_encoding)
    restarted = EncodingCache([MemoryTier(ROOMY), disk], FileFlights(tmp_path))
    for _ in range(2):
        assert_same(restarted.get_or_encode(make_key(), REGISTERED, never), made)
    assert restarted.snapshot().hits == {"memory": 1, "disk": 1}


def test_get_never_encodes(cache):
    assert cache.get(make_key(), REGISTERED) is None
    cache.put(make_key(), make_encoding(), INLINE)
    assert_same(cache.get(make_key(), INLINE), make_encoding())
    stats = cache.snapshot()
    assert (stats.misses, stats.encodes) == (1, 0)


def test_contains_looks_everywhere_and_is_durable_at_the_end_only(cache, memory, disk):
    memory.put(make_key(1), make_encoding(), INLINE)
    disk.put(make_key(2), make_encoding(), INLINE)
    assert [cache.contains(make_key(n)) for n in range(3)] == [False, True, True]
    assert [cache.is_durable(make_key(n)) for n in range(3)] == [False, False, True]
    assert cache.snapshot().hits == {"memory": 0, "disk": 0}


def test_registering_an_inline_clip_promotes_it_in_every_tier(cache, memory, disk):
    cache.get_or_encode(make_key(), INLINE, make_encoding)
    cache.get_or_encode(make_key(), REGISTERED, never)
    for tier in (memory, disk):
        assert tier.stats().segments[REGISTERED].entries == 1
        assert tier.stats().segments[INLINE].entries == 0


def test_a_registration_that_joins_an_inline_encode_ends_up_registered(cache, disk):
    started, gate = threading.Event(), threading.Event()

    def slow():
        started.set()
        gate.wait(10)
        return make_encoding()

    with ThreadPoolExecutor(2) as pool:
        inline = pool.submit(cache.get_or_encode, make_key(), INLINE, slow)
        started.wait(10)
        registration = pool.submit(cache.get_or_encode, make_key(), REGISTERED, never)
        while cache.snapshot().misses < 2:
            pass
        gate.set()
        assert_same(inline.result(10), registration.result(10))
    assert disk.stats().segments[REGISTERED].entries == 1


def test_a_failed_encode_is_counted_and_tried_again(cache):
    def fail():
        raise EncodeError("too short")

    with pytest.raises(EncodeError, match="too short"):
        cache.get_or_encode(make_key(), INLINE, fail)
    cache.get_or_encode(make_key(), INLINE, make_encoding)
    stats = cache.snapshot()
    assert (stats.encode_failures, stats.encodes, stats.in_flight) == (1, 1, 0)


def test_forget_empties_every_tier_for_all_encoders_and_segments(cache, memory, disk):
    for encoder, segment in enumerate((REGISTERED, INLINE)):
        cache.put(make_key(0, encoder), make_encoding(), segment)
    cache.put(make_key(1), make_encoding(), REGISTERED)
    assert cache.forget(AUDIO) == 4
    assert memory.stats().entries == disk.stats().entries == 1
    assert cache.forget(AUDIO) == 0


def test_forgetting_during_an_encode_keeps_it_out_of_every_tier(cache, disk):
    def encode():
        cache.forget(AUDIO)
        return make_encoding()

    assert_same(cache.get_or_encode(make_key(), REGISTERED, encode), make_encoding())
    assert cache.get(make_key(), REGISTERED) is None
    assert not disk.contains(make_key())
    cache.get_or_encode(make_key(), REGISTERED, make_encoding)
    assert disk.contains(make_key()), "a later encode is stored again"


def test_forgetting_one_audio_does_not_touch_the_encode_of_another(cache, disk):
    def encode():
        cache.forget(make_key(1).audio_sha256)
        return make_encoding()

    cache.get_or_encode(make_key(0), REGISTERED, encode)
    assert disk.contains(make_key(0))


def test_a_registration_after_the_forget_keeps_what_the_old_flight_made(cache, disk):
    started, gate = threading.Event(), threading.Event()

    def slow():
        started.set()
        gate.wait(10)
        return make_encoding()

    with ThreadPoolExecutor(2) as pool:
        old = pool.submit(cache.get_or_encode, make_key(), REGISTERED, slow)
        started.wait(10)
        cache.forget(AUDIO)
        new = pool.submit(cache.get_or_encode, make_key(), REGISTERED, never)
        while cache.snapshot().misses < 2:
            pass
        gate.set()
        assert_same(old.result(10), new.result(10))
    assert disk.contains(make_key())


class PausingDisk(DiskTier):
    """A disk tier whose reads can be held up just before they return."""

    def __init__(self, *args):
        super().__init__(*args)
        self.has_read, self.may_return = threading.Event(), threading.Event()

    def get(self, key, segment):
        encoding = super().get(key, segment)
        self.has_read.set()
        self.may_return.wait(10)
        return encoding


def test_a_read_that_was_under_way_does_not_bring_a_forgotten_audio_back(tmp_path):
    memory, disk = MemoryTier(ROOMY), PausingDisk(tmp_path / "disk", ROOMY)
    disk.put(make_key(), make_encoding(), REGISTERED)
    cache = EncodingCache([memory, disk], FileFlights(tmp_path / "locks"))
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(cache.get, make_key(), REGISTERED)
        disk.has_read.wait(10)
        cache.forget(AUDIO)
        disk.may_return.set()
        assert read.result(10) is not None
    assert memory.get(make_key(), REGISTERED) is None


def test_the_fence_remembers_nothing_once_all_is_quiet(cache):
    for n in range(20):
        cache.get_or_encode(make_key(n), INLINE, make_encoding)
        cache.forget(make_key(n).audio_sha256)
    assert not cache._fence._audios


def test_an_encoding_cannot_be_changed_from_either_side(cache):
    given = np.zeros(4, np.float32)
    cache.put(make_key(), Encoding({"x": given}), REGISTERED)
    given[:] = 7
    got = cache.get(make_key(), REGISTERED)
    with pytest.raises(ValueError, match="read-only"):
        got["x"][0] = 7
    with pytest.raises(TypeError):
        got.arrays["x"] = given
    assert cache.get(make_key(), REGISTERED)["x"].tolist() == [0, 0, 0, 0]


def test_stats_are_plain_data_that_survives_msgpack(tmp_path):
    memory = MemoryTier({REGISTERED: Budget(60), INLINE: Budget(0, 0)})
    cache = EncodingCache(
        [memory, DiskTier(tmp_path / "d", ROOMY)], FileFlights(tmp_path / "l")
    )
    for n in range(3):
        cache.get_or_encode(
            make_key(n), REGISTERED, lambda: make_encoding(num_frames=2)
        )
    cache.get(make_key(0), REGISTERED)
    stats = cache.stats()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats)) == stats
    assert stats["hits"] == {"memory": 0, "disk": 1}
    assert (stats["misses"], stats["encodes"], stats["in_flight"]) == (3, 3, 0)
    assert stats["evictions"] == 3
    assert stats["tiers"]["memory"]["segments"]["registered"]["entries"] == 1


def test_a_cache_without_tiers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one tier"):
        EncodingCache([], FileFlights(tmp_path))
