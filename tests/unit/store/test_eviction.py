import time
from dataclasses import replace

import pytest

from tests.encoding_samples import sized_encoding
from tests.store_samples import address, clip, key, publish, register
from vllm_tts_cache.audio.reference import Segment

# A clip of these tests has 8,000 bytes of samples, and a header.
CLIP_BYTES = 8_500


@pytest.fixture
def store(open_here):
    limits = {"inline_audio_max_bytes": 3 * CLIP_BYTES, "disk_max_bytes": 20_000}
    store = open_here(**limits, inline_share=0.25)
    yield store
    assert store.recover() == []


def kept(store, numbers):
    return [number for number in numbers if store.has_audio(address(number))]


@pytest.mark.every_backend
def test_the_least_recently_used_inline_clip_goes_with_its_directory(store):
    for number in range(3):
        store.store_inline(clip(number))
    store.used([address(0)])
    store.store_inline(clip(3))
    assert kept(store, range(4)) == [0, 2, 3]
    assert store.read_audio(address(1)) is None
    directories = [path for path in store.files.store.glob("*/*") if path.is_dir()]
    assert {path.name for path in directories} == {address(n) for n in (0, 2, 3)}


@pytest.mark.every_backend
def test_no_inline_clip_pushes_a_registered_one_out(store):
    register(store, "Ann", 0)
    for number in range(1, 12):
        store.store_inline(clip(number))
    assert store.read_audio(address(0)) is not None
    assert len(kept(store, range(1, 12))) == 3


def test_a_clip_larger_than_the_budget_stays_until_the_next_comes(open_here):
    store = open_here(inline_audio_max_bytes=100)
    for number in range(3):
        store.store_inline(clip(number))
        assert kept(store, range(3)) == [number]


@pytest.mark.every_backend
def test_encodings_go_by_segment_and_use_and_their_audio_stays(store):
    for number in range(4):
        register(store, f"{number}", number)
    store.store_inline(clip(9))
    for number in range(3):
        store.writer.publish(key(number), sized_encoding(4_000))
    store.used([address(0)])
    store.writer.publish(key(9), sized_encoding(4_000))
    store.writer.publish(key(3), sized_encoding(4_000))
    stored = [n for n in (0, 1, 2, 3, 9) if store.read_here(key(n))]
    assert stored == [0, 2, 3, 9]
    assert store.find("1").fingerprints == frozenset()
    assert store.read_audio(address(1)) is not None


@pytest.mark.every_backend
@pytest.mark.parametrize("direction", [-1, 1])
def test_a_clock_that_is_set_does_not_change_who_goes(store, monkeypatch, direction):
    for number in range(2):
        store.store_inline(clip(number))
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + direction * 10**18)
    store.store_inline(clip(2))
    monkeypatch.setattr(time, "time_ns", real)
    store.used([address(0)])
    store.store_inline(clip(3))
    store.store_inline(clip(4))
    assert kept(store, range(5)) == [0, 3, 4]


def test_a_use_is_written_down_once_a_minute(store, monkeypatch):
    store.store_inline(clip(0))
    written = []
    monkeypatch.setattr(store, "used", written.append)
    for _ in range(5):
        store.store_inline(clip(0))
    assert written == [[address(0)]]


@pytest.mark.every_backend
def test_many_victims_go_in_slices(open_here):
    store = open_here(disk_max_bytes=1 << 20, inline_share=0.0)
    register(store, "Ann")
    for number in range(150):
        of = replace(key(0), encoder_fingerprint=f"{number:064x}")
        store.writer.publish(of, sized_encoding(10))
    small = open_here(disk_max_bytes=1_000, inline_share=0.0)
    publish(small)
    assert small.usage()[Segment.REGISTERED]["encodings"].num_files <= 3
