import itertools
import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import rule

from tests.encoding_samples import (
    INLINE,
    REGISTERED,
    ROOMY,
    assert_same,
    make_encoding,
    make_key,
    sized_encoding,
)
from tests.tier_machine import PAYLOADS, TierMachine, audios
from vllm_tts_cache.errors import EncodingCorruptError, StorageError
from vllm_tts_cache.store import serde
from vllm_tts_cache.store.keys import EncodingKey
from vllm_tts_cache.store.tiers import disk_usage
from vllm_tts_cache.store.tiers.base import Budget
from vllm_tts_cache.store.tiers.disk import DiskTier
from vllm_tts_cache.store.tiers.disk_sweep import LOW_WATER, StoredFile, plan_sweep

SIZES = {k: len(serde.encode(k, sized_encoding(n))) for k, n in PAYLOADS.items()}


class DiskMachine(TierMachine):
    budgets = {REGISTERED: Budget(4000, 5), INLINE: Budget(2200, 3)}  # noqa: RUF012
    low_water = LOW_WATER
    touches_on_put = False
    touches_on_contains = True

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        # Far in the past and in steps above the touch interval: a file just
        # published is the newest, and every read counts.
        ticks = itertools.count(1_000_000_000, 100)
        self.clock = lambda: float(next(ticks))
        self.tier = DiskTier(Path(self.folder.name), self.budgets, clock=self.clock)

    def size(self, key):
        return SIZES[key]

    def settle(self, key):
        for path in (self.tier.path(key, s) for s in self.budgets):
            if path.exists() and path.stat().st_mtime > 1_500_000_000:
                os.utime(path, (tick := self.clock(), tick))

    @rule(audio=audios)
    def demote(self, audio):
        moved = [k for k in self.model[REGISTERED] if k.audio_sha256 == audio]
        assert self.tier.demote(audio) == len(moved)
        for key in sorted(moved, key=lambda key: key.encoder_fingerprint):
            self.model[REGISTERED].remove(key)
            self.model_add(key, INLINE)

    def teardown(self):
        assert self.tier.verify(0) == []
        for segment, keys in self.model.items():
            for key in keys:
                assert self.tier.path(key, segment).exists()
        self.folder.cleanup()


TestDiskTierAgainstModel = DiskMachine.TestCase
TestDiskTierAgainstModel.settings = settings(
    deadline=None, max_examples=40, stateful_step_count=25
)


def set_age(tier, key, segment, seconds):
    then = time.time() - seconds
    os.utime(tier.path(key, segment), (then, then))


def test_path_is_the_content_address(tmp_path):
    key = make_key()
    tier = DiskTier(tmp_path, ROOMY)
    tier.put(key, make_encoding(), REGISTERED)
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    audio, encoder = key.audio_sha256, key.encoder_fingerprint
    assert file.relative_to(tmp_path) == Path(
        "v2", "registered", audio[:2], audio, f"{encoder}.safetensors"
    )


@pytest.mark.parametrize(
    "bad", ["", "../" * 21 + "x", "A" * 64, "0" * 63, "0" * 64 + "\n"]
)
def test_a_key_that_is_no_content_address_never_becomes_a_path(tmp_path, bad):
    tier = DiskTier(tmp_path, ROOMY)
    good = make_key().audio_sha256
    for key in (
        EncodingKey(audio_sha256=bad, encoder_fingerprint=good),
        EncodingKey(audio_sha256=good, encoder_fingerprint=bad),
    ):
        for call in (
            lambda key=key: tier.get(key, INLINE),
            lambda key=key: tier.put(key, make_encoding(), INLINE),
            lambda key=key: tier.delete(key),
            lambda key=key: tier.contains(key),
        ):
            with pytest.raises(StorageError, match="Not a content address"):
                call()
    with pytest.raises(StorageError, match="Not a content address"):
        tier.forget(bad)
    assert list(tmp_path.iterdir()) == []


def test_contains_sees_both_segments_and_what_other_processes_wrote(tmp_path):
    tier, other = DiskTier(tmp_path, ROOMY), DiskTier(tmp_path, ROOMY)
    other.put(make_key(1), make_encoding(), REGISTERED)
    other.put(make_key(2), make_encoding(), INLINE)
    assert [tier.contains(make_key(n)) for n in (1, 2, 3)] == [True, True, False]


def test_a_second_put_writes_nothing(tmp_path):
    tier = DiskTier(tmp_path, ROOMY)
    tier.put(make_key(), make_encoding(), REGISTERED)
    before = tier.path(make_key(), REGISTERED).stat()
    tier.put(make_key(), make_encoding(), REGISTERED)
    tier.put(make_key(), make_encoding(), INLINE)
    after = tier.path(make_key(), REGISTERED).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not tier.path(make_key(), INLINE).exists()


def test_promotion_is_a_rename(tmp_path):
    tier = DiskTier(tmp_path, ROOMY)
    tier.put(make_key(), make_encoding(), INLINE)
    inode = tier.path(make_key(), INLINE).stat().st_ino
    assert tier.get(make_key(), REGISTERED) is not None
    assert tier.path(make_key(), REGISTERED).stat().st_ino == inode
    assert not tier.path(make_key(), INLINE).parent.exists()


def test_a_demoted_voice_is_still_found_and_can_be_evicted_by_inline_traffic(tmp_path):
    size = len(serde.encode(make_key(), make_encoding()))
    tier = DiskTier(tmp_path, {REGISTERED: Budget(size), INLINE: Budget(size)})
    tier.put(make_key(), make_encoding(), REGISTERED)
    assert tier.demote(make_key().audio_sha256) == 1
    assert tier.get(make_key(), INLINE) is not None
    tier.put(make_key(1), make_encoding(), INLINE)
    assert tier.get(make_key(), INLINE) is None


@pytest.mark.parametrize("use", ["get", "contains"])
def test_recency_is_written_at_most_once_a_minute(tmp_path, use):
    tier = DiskTier(tmp_path, ROOMY)
    tier.put(make_key(), make_encoding(), REGISTERED)
    path = tier.path(make_key(), REGISTERED)
    for age, is_touched in ((50, False), (70, True)):
        set_age(tier, make_key(), REGISTERED, age)
        before = path.stat().st_mtime_ns
        if use == "get":
            tier.get(make_key(), REGISTERED)
        else:
            tier.contains(make_key())
        assert (path.stat().st_mtime_ns != before) == is_touched


@pytest.mark.parametrize("use", ["get", "contains"])
def test_the_least_recently_used_file_is_evicted_first(tmp_path, use):
    # Looking is what the API process does for a voice that a worker has in memory.
    size = len(serde.encode(make_key(), make_encoding()))
    tier = DiskTier(tmp_path, {REGISTERED: Budget(size * 3), INLINE: Budget(0)})
    for n in range(3):
        tier.put(make_key(n), make_encoding(n), REGISTERED)
        set_age(tier, make_key(n), REGISTERED, 1000 - n)
    if use == "get":
        tier.get(make_key(0), REGISTERED)
    else:
        tier.contains(make_key(0))
    tier.put(make_key(3), make_encoding(3), REGISTERED)
    held = [n for n in range(4) if tier.contains(make_key(n))]
    assert held == [0, 3], "0 was used, 3 is new, and a sweep makes room for more"
    assert tier.stats().evictions == 2


@pytest.mark.parametrize("occasion", ["forget", "sweep"])
def test_files_of_older_formats_go_and_those_of_newer_ones_stay(tmp_path, occasion):
    tier = DiskTier(tmp_path, ROOMY)
    tier.put(make_key(), make_encoding(), REGISTERED)
    audio = make_key(1).audio_sha256
    old, newer, ours = (
        tmp_path / name / "registered" / audio[:2] / audio
        for name in ("v1", "v10", "v1-of-somebody")
    )
    for directory in (old, newer, ours):
        directory.mkdir(parents=True)
        (directory / "f.safetensors").write_bytes(b"voice")
    if occasion == "forget":
        tier.forget(audio)
    else:
        tier.sweep(REGISTERED)
    assert not (tmp_path / "v1").exists()
    assert (newer / "f.safetensors").exists()
    assert (ours / "f.safetensors").exists()
    assert_same(tier.get(make_key(), REGISTERED), make_encoding())


def test_the_running_total_agrees_with_a_scan(tmp_path):
    tier = DiskTier(tmp_path, ROOMY)
    for n in range(6):
        tier.put(make_key(n), make_encoding(n, num_frames=n), INLINE)
    tier.get(make_key(0), REGISTERED)
    tier.promote(make_key(1))
    tier.put(make_key(2), make_encoding(2), REGISTERED)
    tier.demote(make_key(1).audio_sha256)
    tier.delete(make_key(3))
    tier.forget(make_key(4).audio_sha256)
    tier.path(make_key(5), INLINE).write_bytes(b"x")
    with pytest.raises(EncodingCorruptError):
        tier.get(make_key(5), INLINE)
    scanned = DiskTier(tmp_path, ROOMY).stats().segments
    for segment, stats in tier.stats().segments.items():
        assert stats.entries == scanned[segment].entries
    registered = tier.stats().segments[REGISTERED]
    assert registered.bytes == scanned[REGISTERED].bytes > 0


def test_what_another_process_wrote_counts_after_some_puts(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_usage, "_PUTS_PER_SCAN", 5)
    size = len(serde.encode(make_key(), make_encoding()))
    budgets = {REGISTERED: Budget(size * 20), INLINE: Budget(0)}
    tiers = [DiskTier(tmp_path, budgets) for _ in range(2)]
    for n in range(39):  # by its own count, neither of the two is over the budget
        tiers[n % 2].put(make_key(n), make_encoding(n), REGISTERED)
    assert sum(tiers[0].contains(make_key(n)) for n in range(39)) <= 20 + 5


def test_forgetting_leaves_no_trace_of_the_audio(tmp_path):
    tier = DiskTier(tmp_path, ROOMY)
    audio = make_key(1).audio_sha256
    tier.put(make_key(1, 0), make_encoding(), REGISTERED)
    tier.put(make_key(1, 1), make_encoding(), INLINE)
    tier.put(make_key(2), make_encoding(), REGISTERED)
    tier.path(make_key(1, 0), REGISTERED).with_name(".partial-x").write_bytes(b"voice")
    quarantined = tmp_path / "quarantine" / audio
    quarantined.mkdir(parents=True)
    (quarantined / "f.safetensors").write_bytes(b"voice")
    assert tier.forget(audio) == 2
    assert [path for path in tmp_path.rglob("*") if audio in str(path)] == []
    assert tier.contains(make_key(2))
    assert (tier.forget(audio), tier.stats().entries) == (0, 1)


def test_a_plan_changes_nothing_until_it_is_executed(tmp_path):
    files = [StoredFile(tmp_path / str(n), 10, mtime=-n) for n in range(5)]
    for file in files:
        file.path.write_bytes(b"0123456789")
    plan = plan_sweep(files, Budget(30), keep=files[4].path)
    assert [file.path.name for file in plan.files] == ["3", "2", "1"]
    assert plan.num_bytes == 30
    assert len(list(tmp_path.iterdir())) == 5
    files[3].path.unlink()
    assert plan.execute() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "4"]


def test_verify_names_what_is_wrong(tmp_path):
    tier = DiskTier(tmp_path, ROOMY)
    for n in range(3):
        tier.put(make_key(n), make_encoding(n), REGISTERED)
    corrupt, misnamed, partial = (tier.path(make_key(n), REGISTERED) for n in range(3))
    corrupt.write_bytes(b"x")
    misnamed = misnamed.rename(misnamed.with_name("alice.safetensors"))
    partial = partial.with_name(".partial-abc")
    partial.write_bytes(b"x")
    assert tier.verify() == [
        f"corrupt: {corrupt}: " + tier.verify()[0].split(": ", 2)[2],
        f"misnamed: {misnamed}",
    ]
    assert f"partial: {partial}" in tier.verify(0)
    assert (tier.remove_partials(3600), tier.remove_partials(0)) == (0, 1)
    assert not partial.exists()
