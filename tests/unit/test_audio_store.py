import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.errors import SourceCorruptError
from vllm_tts_cache.store.audio_store import AudioStore

INLINE, REGISTERED = Segment.INLINE, Segment.REGISTERED


def make_audio(number=1, num_samples=1_000):
    samples = np.full(num_samples, number / 1000, np.float32)
    return ReferenceAudio.of(samples, 24_000)


def segment_of(path):
    return path.parent.parent.name


def age(path, seconds):
    """Make a file look unused for so long."""
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


@pytest.fixture
def store(tmp_path):
    store = AudioStore(tmp_path, inline_max_bytes=1 << 20)
    yield store
    assert store.verify() == []


@pytest.mark.parametrize("segment", Segment)
def test_what_was_put_is_got(store, segment):
    audio = make_audio()
    assert store.get(audio.audio_sha256) is None
    assert store.path(audio.audio_sha256) is None
    path = store.put(audio, segment)
    got = store.get(audio.audio_sha256)
    assert store.path(audio.audio_sha256) == path
    assert got.samples.tobytes() == audio.samples.tobytes()
    assert (got.sample_rate_hz, got.audio_sha256) == (24_000, audio.audio_sha256)
    assert not got.samples.flags.writeable


def test_file_is_where_and_what_stock_adapters_read(store, tmp_path):
    audio = make_audio()
    sha = audio.audio_sha256
    path = store.put(audio, REGISTERED)
    assert path == tmp_path / "v1" / "registered" / sha[:2] / f"{sha}.safetensors"
    with safetensors.safe_open(path, "numpy") as file:
        assert list(file.keys()) == ["audio"]
        assert file.metadata() == {"sample_rate": "24000", "audio_sha256": sha}
        np.testing.assert_array_equal(file.get_tensor("audio"), audio.samples)


def test_second_put_writes_nothing(store):
    path = store.put(make_audio(), REGISTERED)
    before = path.stat()
    assert store.put(make_audio(), REGISTERED) == path
    assert path.stat().st_ino == before.st_ino


def test_registering_inline_audio_moves_its_file(store):
    inline = store.put(make_audio(), INLINE)
    inode = inline.stat().st_ino
    registered = store.put(make_audio(), REGISTERED)
    assert segment_of(registered) == "registered"
    assert registered.stat().st_ino == inode
    assert not inline.exists()


def test_registered_audio_stays_registered_when_it_also_comes_inline(store):
    registered = store.put(make_audio(), REGISTERED)
    assert store.put(make_audio(), INLINE) == registered
    assert store.plan_inline_sweep().kept_bytes == 0


def test_demoted_audio_is_inline_and_still_found(store):
    sha = make_audio().audio_sha256
    age(store.put(make_audio(), REGISTERED), 1_000)
    old = store.path(sha).stat().st_mtime
    store.demote(sha)
    assert segment_of(store.path(sha)) == "inline"
    assert store.path(sha).stat().st_mtime > old
    assert store.get(sha) is not None
    assert list(store.iter_registered()) == []


def test_demoting_what_is_not_registered_does_nothing(store):
    store.demote(make_audio(1).audio_sha256)
    path = store.put(make_audio(2), INLINE)
    store.demote(make_audio(2).audio_sha256)
    assert path.exists()


@pytest.mark.parametrize("segment", Segment)
def test_deleted_audio_is_gone_from_both_segments(store, segment):
    sha = make_audio().audio_sha256
    path = store.put(make_audio(), segment)
    (other,) = {"registered", "inline"} - {segment.value}
    copy = path.parents[2] / other / path.parent.name / path.name
    copy.parent.mkdir(parents=True)
    shutil.copy(path, copy)
    assert store.delete(sha)
    assert store.get(sha) is None
    assert not store.delete(sha)


def test_deleted_audio_is_gone_from_quarantine(store, tmp_path):
    path = store.put(make_audio(), REGISTERED)
    os.truncate(path, 100)
    with pytest.raises(SourceCorruptError):
        store.get(make_audio().audio_sha256)
    assert store.delete(make_audio().audio_sha256)
    assert list((tmp_path / "quarantine").iterdir()) == []


def test_registered_audio_is_listed(store):
    audios = [make_audio(n) for n in range(1, 6)]
    for audio in audios:
        store.put(audio, REGISTERED)
    store.put(make_audio(9), INLINE)
    assert set(store.iter_registered()) == {a.audio_sha256 for a in audios}


@pytest.mark.parametrize(
    "name",
    ["", "../../etc/passwd", "a" * 63, "a" * 65, "A" * 64, "a" * 64 + "\n", "g" * 64],
)
def test_nothing_but_a_sha256_names_a_file(store, name):
    for call in (store.get, store.path, store.delete, store.demote):
        with pytest.raises(ValueError, match="SHA-256"):
            call(name)


class TestInlineBudget:
    FILE_BYTES = 4_000 + 200  # 1000 samples and a header; checked below

    def fill(self, store, count):
        paths = []
        for number in range(1, count + 1):
            paths.append(store.put(make_audio(number), INLINE))
            age(paths[-1], 1_000 - number)
        return paths

    def test_least_recently_used_goes_first(self, tmp_path):
        store = AudioStore(tmp_path, inline_max_bytes=10 * self.FILE_BYTES)
        paths = self.fill(store, 10)
        assert {path.stat().st_size for path in paths} == {self.FILE_BYTES}
        store.get(make_audio(1).audio_sha256)
        store.put(make_audio(2), INLINE)
        store.put(make_audio(99), INLINE)
        # One is too many, and an eighth of the budget more makes room ahead.
        gone = [n for n, path in enumerate(paths, 1) if not path.exists()]
        assert gone == [3, 4, 5]

    def test_registered_audio_does_not_count_and_never_goes(self, tmp_path):
        store = AudioStore(tmp_path, inline_max_bytes=2 * self.FILE_BYTES)
        for number in range(1, 6):
            store.put(make_audio(number), REGISTERED)
        for number in range(10, 20):
            store.put(make_audio(number), INLINE)
        assert len(list(store.iter_registered())) == 5

    def test_audio_just_put_stays_even_if_it_alone_is_too_large(self, tmp_path):
        store = AudioStore(tmp_path, inline_max_bytes=100)
        for number in range(1, 4):
            store.put(make_audio(number), INLINE)
            assert store.get(make_audio(number).audio_sha256) is not None
        assert store.plan_inline_sweep().freed_bytes == self.FILE_BYTES

    def test_demoted_audio_counts(self, tmp_path):
        store = AudioStore(tmp_path, inline_max_bytes=3 * self.FILE_BYTES)
        for number in range(1, 8):
            store.put(make_audio(number), REGISTERED)
            store.demote(make_audio(number).audio_sha256)
            assert store.path(make_audio(number).audio_sha256) is not None
        assert store.plan_inline_sweep().drop == ()

    def test_plan_changes_nothing_until_it_is_executed(self, tmp_path):
        paths = self.fill(AudioStore(tmp_path, inline_max_bytes=1 << 20), 4)
        store = AudioStore(tmp_path, inline_max_bytes=2 * self.FILE_BYTES)
        plan = store.plan_inline_sweep()
        assert [entry.path for entry in plan.drop] == paths[:2]
        assert plan.freed_bytes == plan.kept_bytes == 2 * self.FILE_BYTES
        assert all(path.exists() for path in paths)
        paths[0].unlink()
        plan.execute()
        assert [path.exists() for path in paths] == [False, False, True, True]

    def test_files_of_other_processes_are_found(self, tmp_path):
        budget = 16 * self.FILE_BYTES
        stores = [AudioStore(tmp_path, inline_max_bytes=budget) for _ in range(3)]
        for number in range(1, 70):
            stores[number % 3].put(make_audio(number), INLINE)
        used = stores[0].plan_inline_sweep()
        assert used.kept_bytes + used.freed_bytes <= budget * (1 + 3 / 8)

    def test_most_puts_do_not_look_at_the_other_files(self, tmp_path, monkeypatch):
        store = AudioStore(tmp_path, inline_max_bytes=80 * self.FILE_BYTES)
        scans = []
        real = os.scandir

        def scandir(path):
            if os.fspath(path).endswith("inline"):
                scans.append(path)
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
        for number in range(1, 121):
            store.put(make_audio(number), INLINE)
        assert len(scans) <= 120 / 8


class InlineStore(RuleBasedStateMachine):
    """Whatever happens, the budget holds and registered audio stays."""

    BUDGET = 6 * 4_200

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.store = AudioStore(self.root, self.BUDGET)
        self.registered = set()

    def teardown(self):
        assert self.store.verify() == []
        shutil.rmtree(self.root)

    @rule(number=st.integers(1, 12))
    def put_inline(self, number):
        self.store.put(make_audio(number), INLINE)
        assert self.store.get(make_audio(number).audio_sha256) is not None

    @rule(number=st.integers(1, 12))
    def register(self, number):
        self.store.put(make_audio(number), REGISTERED)
        self.registered.add(make_audio(number).audio_sha256)

    @rule(number=st.integers(1, 12))
    def demote(self, number):
        self.store.demote(make_audio(number).audio_sha256)
        self.registered.discard(make_audio(number).audio_sha256)

    @rule(number=st.integers(1, 12))
    def delete(self, number):
        self.store.delete(make_audio(number).audio_sha256)
        self.registered.discard(make_audio(number).audio_sha256)
        assert self.store.get(make_audio(number).audio_sha256) is None

    @rule()
    def restart(self):
        self.store = AudioStore(self.root, self.BUDGET)

    @invariant()
    def budget_holds(self):
        assert self.store.plan_inline_sweep().drop == ()

    @invariant()
    def registered_audio_is_there(self):
        assert set(self.store.iter_registered()) == self.registered


TestInlineStore = InlineStore.TestCase
TestInlineStore.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None
)
