import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.encoding_samples import ROOMY, assert_same, make_encoding
from tests.store_samples import address, delete, key, register
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.store.cache import EncodingCache, MemoryTier, open_cache
from vllm_tts_cache.store.speaker_store import SpeakerStore

REGISTERED, INLINE = Segment.REGISTERED, Segment.INLINE


@pytest.fixture
def memory():
    return MemoryTier(ROOMY)


@pytest.fixture
def cache(memory, store):
    register(store, "Ann", 0)
    return EncodingCache(memory, store)


@pytest.mark.every_backend
def test_what_is_put_is_in_memory_and_outlives_the_process(cache, memory, store):
    assert cache.get(key(), REGISTERED) is None
    cache.put(key(), make_encoding(), REGISTERED, since=0)
    assert_same(memory.get(key(), REGISTERED), make_encoding())
    assert_same(store.read(key()), make_encoding())
    assert (memory.contains(key()), cache.is_stored(key())) == (True, True)


@pytest.mark.every_backend
def test_a_restart_reads_the_file_once_and_then_memory(cache, store):
    cache.put(key(), make_encoding(), REGISTERED, since=0)
    restarted = EncodingCache(MemoryTier(ROOMY), store)
    for _ in range(2):
        assert_same(restarted.get(key(), REGISTERED), make_encoding())
    assert restarted.stats()["hits"] == {"memory": 1, "disk": 1}


@pytest.mark.every_backend
def test_what_was_deleted_while_it_was_encoded_is_kept_nowhere(cache, memory, store):
    delete(store, "Ann")
    cache.put(key(), make_encoding(), REGISTERED, since=0)
    assert not memory.contains(key())
    assert not cache.is_stored(key())


def test_a_late_read_brings_no_deleted_voice_back(cache, memory, store, monkeypatch):
    store.writer.publish(key(), make_encoding())
    has_read, may_return = threading.Event(), threading.Event()
    read_here = store.read_here

    def slowly(key):
        encoding = read_here(key)
        has_read.set()
        may_return.wait(10)
        return encoding

    monkeypatch.setattr(store, "read_here", slowly)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(cache.get, key(), REGISTERED)
        has_read.wait(10)
        delete(store, "Ann")
        memory.delete(address())
        may_return.set()
        assert read.result(10) is not None
    assert not memory.contains(key())


class BrokenStore(SpeakerStore):
    def __init__(self):
        disk: Any = self
        self.files = self.writer = disk
        for name in ("read", "read_here", "exists", "publish", "note_failed"):
            setattr(self, name, self.fail)

    def fail(self, *_):
        raise StorageError("the disk is gone")


def test_a_broken_disk_keeps_memory_and_never_raises(memory, plugin_log):
    cache = EncodingCache(memory, BrokenStore())
    for _ in range(50):
        assert cache.get(key(), REGISTERED) is None
    assert cache.is_stored(key()) is False
    cache.put(key(), make_encoding(), REGISTERED, since=0)
    assert_same(cache.get(key(), REGISTERED), make_encoding())
    assert cache.stats()["tier_errors"] == 52
    assert len(plugin_log.records) == 1


def test_a_broken_disk_does_not_keep_a_voice_that_was_deleted_meanwhile(memory):
    cache = EncodingCache(memory, BrokenStore())
    memory.delete(address(0))  # while it was encoded
    for number in (0, 1):
        cache.put(key(number), make_encoding(), REGISTERED, since=0)
    assert not memory.contains(key(0))
    assert memory.contains(key(1))
    cache.put(key(0), make_encoding(), REGISTERED, since=memory.num_deletes)
    assert memory.contains(key(0)), "registered again"


@pytest.mark.every_backend
def test_a_corrupt_file_is_a_miss_and_counted(cache, store):
    store.writer.publish(key(), make_encoding())
    with open(store.files.file_name(address(), "e" * 64), "r+b") as file:  # noqa: PTH123
        file.truncate(100)
    assert cache.get(key(), REGISTERED) is None
    stats = cache.stats()
    assert (stats["corrupt"], stats["misses"], stats["tier_errors"]) == (1, 1, 0)
    cache.put(key(), make_encoding(), REGISTERED, since=0)


def test_the_memory_is_split_between_registered_and_inline():
    limits: Any = {"memory_max_bytes": 1000, "memory_max_entries": 100}
    settings = Settings(**limits, inline_share=0.25)
    segments = open_cache(settings, BrokenStore()).memory.stats().segments
    assert segments[REGISTERED].max_bytes == 750
    assert segments[INLINE].max_bytes == 250
    assert (segments[REGISTERED].max_entries, segments[INLINE].max_entries) == (75, 25)
