"""Pinned voices: how many there may be, and that memory keeps them."""

import threading

import pytest

from tests.encoding_samples import make_encoding
from tests.store_samples import address, delete, key, publish, register
from vllm_tts_cache.catalogue.changes import SpeakerChanges
from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.errors import PinLimitError, StorageError
from vllm_tts_cache.model_executor.pins import Pins
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.memory import MemoryTier
from vllm_tts_cache.store.stats import Budget, Held

ENCODERS = {"e": "e" * 64, "f": "f" * 64}


def small_cache(store, num_entries=2):
    budget = Budget(1 << 30, num_entries)
    return EncodingCache(MemoryTier(dict.fromkeys(Segment, budget)), store)


def pins_of(store, cache):
    return Pins(cache, store.pinned_audio, lambda: ENCODERS, round_seconds=0.01)


def pin(store, name, is_pinned=True):
    return store.change(name, SpeakerChanges({"is_pinned": is_pinned}))


def in_memory(cache, number, encoder="e"):
    return cache._memory.contains(key(number, encoder))


def flood(cache, numbers=range(5, 12)):
    for number in numbers:
        for segment in Segment:
            cache._memory.put(
                key(number), make_encoding(number), segment, since=1 << 60
            )


def test_a_pinned_voice_is_loaded_and_nothing_pushes_it_out(store):
    cache = small_cache(store)
    pins = pins_of(store, cache)
    for number, name in enumerate(("Ann", "Bea", "Cid")):
        register(store, name, number, is_pinned=name != "Cid")
        for encoder in "ef":
            publish(store, number, encoder)
    pins.refresh()
    flood(cache)
    for encoder in "ef":
        assert in_memory(cache, 0, encoder) and in_memory(cache, 1, encoder)
    assert not in_memory(cache, 2)
    tier = cache.stats().memory
    assert tier.pinned.entries == 4 and tier.entries == 4 + 2
    pin(store, "Ann", False)
    pins.refresh()
    flood(cache)
    assert not in_memory(cache, 0) and in_memory(cache, 1)
    assert cache.stats().memory.pinned.entries == 2


def test_what_is_in_memory_is_kept_when_its_voice_is_pinned(store):
    cache = small_cache(store)
    register(store, "Ann", 0)
    cache.put(key(0), make_encoding(0), Segment.INLINE)
    pin(store, "Ann")
    pins_of(store, cache).refresh()
    flood(cache)
    assert in_memory(cache, 0)
    assert cache.get(key(0), Segment.REGISTERED) is not None


def test_a_voice_that_is_encoded_later_is_kept_then(store):
    cache = small_cache(store)
    pins = pins_of(store, cache)
    register(store, "Ann", 0, is_pinned=True)
    pins.refresh()
    assert not in_memory(cache, 0)
    cache.put(key(0), make_encoding(0), Segment.REGISTERED)
    flood(cache)
    assert in_memory(cache, 0)


def test_deleting_a_pinned_voice_takes_it_out_of_memory(store):
    cache = small_cache(store)
    register(store, "Ann", 0, is_pinned=True)
    publish(store, 0)
    pins = pins_of(store, cache)
    pins.refresh()
    delete(store, "Ann")
    assert cache.delete(address(0)) == 1
    pins.refresh()
    assert not in_memory(cache, 0)
    assert cache.stats().memory.pinned == Held(0, 0)


def test_as_many_are_pinned_as_may_be(open_here):
    store = open_here(max_pinned=1)
    register(store, "Ann", 0, is_pinned=True)
    with pytest.raises(PinLimitError, match="SPEAKER_CACHE_MAX_PINNED"):
        register(store, "Bea", 1, is_pinned=True)
    assert store.find("Bea") is None
    register(store, "Bea", 1)
    with pytest.raises(PinLimitError):
        pin(store, "Bea")
    record = pin(store, "Ann").record  # it is already
    assert record.is_pinned
    register(store, "Ann", 2, is_pinned=True)
    pin(store, "Ann", False)
    assert pin(store, "Bea").record.is_pinned


def test_a_thread_asks_until_it_is_closed(store):
    asked = threading.Semaphore(0)

    def pinned():
        asked.release()
        return frozenset()

    pins = Pins(small_cache(store), pinned, lambda: ENCODERS, round_seconds=0.001)
    pins.start()
    for _ in range(3):
        assert asked.acquire(timeout=20)
    pins.close()
    assert not pins._thread.is_alive()


@pytest.mark.sqlite
def test_a_catalogue_that_fails_ends_no_thread(store, plugin_log):
    calls = []

    def pinned():
        calls.append(1)
        raise StorageError("the disk is gone")

    pins = Pins(small_cache(store), pinned, lambda: ENCODERS, round_seconds=0.001)
    pins.start()
    while len(calls) < 3:
        assert pins._thread.is_alive()
    pins.close()
    assert "Pinned voices" in plugin_log.text
