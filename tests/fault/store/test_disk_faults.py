"""A damaged or unwilling disk: what is served is right or nothing."""

import os
import resource
from contextlib import contextmanager

import pytest

from tests.encoding_samples import (
    INLINE,
    REGISTERED,
    ROOMY,
    assert_same,
    make_encoding,
    make_key,
)
from vllm_tts_cache.errors import EncodingCorruptError, StorageError, StorageFullError
from vllm_tts_cache.store.tiers.base import Budget
from vllm_tts_cache.store.tiers.disk import DiskTier


@pytest.fixture
def disk(tmp_path):
    """A tier that holds one registered encoding, and is sound when the test ends."""
    tier = DiskTier(tmp_path, ROOMY)
    tier.put(make_key(), make_encoding(), REGISTERED)
    yield tier
    assert tier.verify(0) == []


@contextmanager
def limited(which, soft):
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


@contextmanager
def no_free_descriptor():
    spare = os.dup(0)
    os.close(spare)
    with limited(resource.RLIMIT_NOFILE, spare):
        yield


def test_no_flipped_byte_is_ever_served(disk, tmp_path):
    path = disk.path(make_key(), REGISTERED)
    good = path.read_bytes()
    for offset in range(len(good)):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(
            good[:offset] + bytes([good[offset] ^ 0xFF]) + good[offset + 1 :]
        )
        with pytest.raises(EncodingCorruptError):
            disk.get(make_key(), REGISTERED)
        assert disk.get(make_key(), REGISTERED) is None, "it was not set aside"
    assert len([p for p in (tmp_path / "quarantine").rglob("*") if p.is_file()]) == 1


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, -1])
def test_a_truncated_file_is_set_aside_and_can_be_put_again(disk, length):
    path = disk.path(make_key(), REGISTERED)
    os.truncate(path, length if length >= 0 else path.stat().st_size - 1)
    with pytest.raises(EncodingCorruptError):
        disk.get(make_key(), REGISTERED)
    disk.put(make_key(), make_encoding(), REGISTERED)
    assert_same(disk.get(make_key(), REGISTERED), make_encoding())
    assert disk.stats().entries == 1


def test_a_corrupt_file_that_cannot_be_set_aside_is_removed(disk, tmp_path):
    (tmp_path / "quarantine").write_text("in the way")
    disk.path(make_key(), REGISTERED).write_bytes(b"x")
    with pytest.raises(EncodingCorruptError):
        disk.get(make_key(), REGISTERED)
    assert disk.get(make_key(), REGISTERED) is None
    (tmp_path / "quarantine").unlink()


def test_the_quarantine_is_bounded(disk, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "vllm_tts_cache.store.tiers.disk_quarantine._BUDGET", Budget(1 << 20, 10)
    )
    for n in range(1, 40):
        disk.put(make_key(n), make_encoding(n), INLINE)
        disk.path(make_key(n), INLINE).write_bytes(b"x")
        with pytest.raises(EncodingCorruptError):
            disk.get(make_key(n), INLINE)
    assert 0 < len(list((tmp_path / "quarantine").iterdir())) <= 10


def test_a_file_moved_to_another_key_is_not_served(disk):
    target = disk.path(make_key(2), REGISTERED)
    target.parent.mkdir(parents=True)
    disk.path(make_key(), REGISTERED).rename(target)
    with pytest.raises(EncodingCorruptError, match="another key"):
        disk.get(make_key(2), REGISTERED)


def test_a_symlink_loop_is_reported_and_left_alone(disk):
    # Root ignores permission bits, so taking them away would not fail here.
    path = disk.path(make_key(), REGISTERED)
    saved = path.rename(path.with_suffix(".saved"))
    path.symlink_to(path)
    for call in (
        lambda: disk.get(make_key(), REGISTERED),
        lambda: disk.contains(make_key()),
        lambda: disk.put(make_key(), make_encoding(), REGISTERED),
    ):
        with pytest.raises(StorageError, match="symbolic links"):
            call()
    assert path.is_symlink()
    saved.replace(path)
    assert_same(disk.get(make_key(), REGISTERED), make_encoding())


def test_a_directory_in_the_files_place_is_reported_and_left_alone(disk):
    path = disk.path(make_key(1), REGISTERED)
    path.mkdir(parents=True)
    for call in (
        lambda: disk.get(make_key(1), REGISTERED),
        lambda: disk.put(make_key(1), make_encoding(), REGISTERED),
        lambda: disk.forget(make_key(1).audio_sha256),
    ):
        with pytest.raises(StorageError, match="directory"):
            call()
    assert disk.contains(make_key(1)) is False
    assert path.is_dir()


def test_running_out_of_descriptors_costs_nothing_but_the_call(disk):
    with no_free_descriptor():
        for call in (
            lambda: disk.get(make_key(), REGISTERED),
            lambda: disk.put(make_key(1), make_encoding(), REGISTERED),
            lambda: disk.sweep(REGISTERED),
            disk.verify,
            lambda: disk.forget(make_key().audio_sha256),
        ):
            with pytest.raises(StorageError, match="Too many open files"):
                call()
    assert_same(disk.get(make_key(), REGISTERED), make_encoding())


def test_a_file_size_limit_is_a_full_disk_and_leaves_nothing_behind(disk):
    with limited(resource.RLIMIT_FSIZE, 100), pytest.raises(StorageFullError):
        disk.put(make_key(1), make_encoding(), REGISTERED)
    assert not disk.path(make_key(1), REGISTERED).parent.exists()
    disk.put(make_key(1), make_encoding(), REGISTERED)
    assert disk.contains(make_key(1))


def test_a_promotion_that_fails_does_not_cost_the_answer(disk):
    disk.put(make_key(1), make_encoding(1), INLINE)
    target = disk.path(make_key(1), REGISTERED).parent
    target.parent.mkdir(parents=True, exist_ok=True)
    # A dangling link: there is nothing to read behind it, and mkdir refuses it.
    target.symlink_to(target.with_name("nowhere"))
    assert_same(disk.get(make_key(1), REGISTERED), make_encoding(1))
    with pytest.raises(StorageError):
        disk.promote(make_key(1))
    target.unlink()
    assert disk.promote(make_key(1)) is True
