"""A broken tier costs time, never a request."""

import errno
import logging
import os
import resource

import pytest

from tests.encoding_samples import (
    INLINE,
    REGISTERED,
    ROOMY,
    assert_same,
    make_encoding,
    make_key,
)
from tests.fault.store.test_disk_faults import limited, no_free_descriptor
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.flights import FileFlights
from vllm_tts_cache.store.tiers.disk import DiskTier
from vllm_tts_cache.store.tiers.memory import MemoryTier


@pytest.fixture
def disk(tmp_path):
    tier = DiskTier(tmp_path / "encodings", ROOMY)
    yield tier
    assert tier.verify(0) == []


@pytest.fixture
def cache(tmp_path, disk):
    return EncodingCache([MemoryTier(ROOMY), disk], FileFlights(tmp_path / "locks"))


def test_a_full_disk_costs_time_not_the_request(cache, disk, monkeypatch):
    def no_space(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        made = cache.get_or_encode(make_key(), REGISTERED, make_encoding)
    assert_same(made, make_encoding())
    assert_same(cache.get(make_key(), REGISTERED), made)
    assert not disk.contains(make_key())
    assert cache.snapshot().tier_errors > 0


def test_a_file_size_limit_costs_time_not_the_request(cache, disk):
    with limited(resource.RLIMIT_FSIZE, 100):
        cache.get_or_encode(make_key(), REGISTERED, make_encoding)
    assert not disk.contains(make_key())
    cache.put(make_key(), make_encoding(), REGISTERED)
    assert disk.contains(make_key())


def test_running_out_of_descriptors_costs_time_not_the_request(cache):
    with no_free_descriptor():
        made = cache.get_or_encode(make_key(), REGISTERED, make_encoding)
    assert_same(made, make_encoding())
    assert cache.snapshot().encodes == 1


def test_a_corrupt_file_is_encoded_again_and_counted(cache, disk, tmp_path):
    disk.put(make_key(), make_encoding(), REGISTERED)
    path = disk.path(make_key(), REGISTERED)
    path.write_bytes(path.read_bytes()[:-1])
    got = cache.get_or_encode(make_key(), REGISTERED, make_encoding)
    assert_same(got, make_encoding())
    assert_same(disk.get(make_key(), REGISTERED), make_encoding())
    stats = cache.snapshot()
    assert (stats.corrupt, stats.encodes, stats.tier_errors) == (1, 1, 0)


def test_a_broken_tier_does_not_hide_the_one_behind_it(tmp_path, disk):
    (tmp_path / "broken").write_text("a file where the directory should be")
    broken = DiskTier(tmp_path / "broken", ROOMY)
    cache = EncodingCache([broken, disk], FileFlights(tmp_path / "locks"))
    disk.put(make_key(), make_encoding(), REGISTERED)
    assert_same(cache.get(make_key(), REGISTERED), make_encoding())
    stats = cache.stats()
    assert stats["hits"]["disk"] == 1
    assert stats["tier_errors"] > 0
    assert cache.get(make_key(1), INLINE) is None


def test_a_failing_tier_does_not_fill_the_log(tmp_path, caplog):
    (tmp_path / "broken").write_text("a file where the directory should be")
    broken = DiskTier(tmp_path / "broken", ROOMY)
    cache = EncodingCache([broken], FileFlights(tmp_path / "locks"))
    with caplog.at_level(logging.WARNING):
        for n in range(50):
            cache.get_or_encode(make_key(n), REGISTERED, make_encoding)
    assert len(caplog.records) == 1
    assert "disk tier" in caplog.text


def test_a_forget_that_fails_says_so_after_trying_every_tier(tmp_path, disk):
    (tmp_path / "broken").write_text("a file where the directory should be")
    broken = DiskTier(tmp_path / "broken", ROOMY)
    cache = EncodingCache([broken, disk], FileFlights(tmp_path / "locks"))
    disk.put(make_key(), make_encoding(), REGISTERED)
    with pytest.raises(StorageError):
        cache.forget(make_key().audio_sha256)
    assert not disk.contains(make_key())


def test_forgetting_during_an_encode_leaves_nothing_on_disk(cache, disk):
    def encode():
        cache.forget(make_key().audio_sha256)
        return make_encoding()

    assert_same(cache.get_or_encode(make_key(), REGISTERED, encode), make_encoding())
    assert not disk.path(make_key(), REGISTERED).parent.exists()
    assert cache.get(make_key(), REGISTERED) is None
