import sqlite3
import time

import numpy as np
import pytest

from tests.encoding_samples import assert_same, make_encoding
from tests.old_layout import OldLayout
from tests.store_samples import (
    address,
    clip,
    delete,
    key,
    opened,
    publish,
    register,
    traces,
)
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.store import takeover
from vllm_tts_cache.store.speaker_store import Found, SpeakerStore

pytestmark = pytest.mark.sqlite  # old layouts: test_binding takes one over elsewhere
REGISTERED, INLINE = Segment.REGISTERED, Segment.INLINE


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "voices"


@pytest.fixture
def old(directory):
    return OldLayout(directory)


@pytest.fixture
def take_over(old, directory):
    stores = []

    def take_over_():
        old.close()
        stores.append(opened(directory))
        assert stores[-1].verify() == []
        return stores[-1]

    yield take_over_
    for store in stores:
        assert store.verify() == []
        assert store.recover() == []
        store.close()


def found(store: SpeakerStore, name: str) -> Found:
    result = store.find(name)
    assert result is not None
    return result


def names_in(directory):
    return {path.name for path in directory.iterdir()}


def test_voices_audio_and_encodings_are_taken_over_as_they_were(old, take_over):
    paths = []
    for number, name in enumerate(("Ann", "Bob")):
        old.voice(name, number, ref_text="hallo", file_size=5)
        paths.append(old.audio(number))
        paths.append(old.encoding(number))
        paths.append(old.encoding(number, encoder="f"))
    inodes = {path.stat().st_ino for path in paths}
    store = take_over()
    for number, name in enumerate(("Ann", "Bob")):
        there = found(store, name)
        assert (there.record.name, there.record.ref_text) == (name, "hallo")
        assert there.record.created_at == 1000.0 + number
        assert there.fingerprints == {"e" * 64, "f" * 64}
        samples = store.read_audio(address(number)).samples
        assert np.array_equal(samples, clip(number).audio.samples)
        assert_same(store.read(key(number)), make_encoding(number))
    now = {p.stat().st_ino for p in store.files.store.rglob("*") if p.is_file()}
    assert now == inodes  # renamed, not written


def test_nothing_of_the_old_layout_is_left(old, take_over, directory):
    old.voice("Ann", 0)
    old.audio(0)
    old.rubbish()
    take_over()
    assert names_in(directory) == {
        "store",
        "directory-id",
        "catalogue.sqlite3",
        "catalogue.sqlite3-wal",
        "catalogue.sqlite3-shm",
        "catalogue.sqlite3.lock",
    }
    modes = {path.stat().st_mode & 0o077 for path in directory.rglob("*")}
    assert modes == {0}


def test_a_generation_is_never_used_again(old, take_over):
    old.voice("Ann", 0)
    old.audio(0)
    last = 0
    for _ in range(3):
        last = old.voice("Bob", 1)
        old.db.execute("DELETE FROM speaker WHERE name = 'Bob'")
    store = take_over()
    assert store.find("Ann").record.generation == 1
    assert register(store, "Bob", 1).record.generation == last + 1


def test_what_nobody_has_is_not_taken_over(old, take_over, directory):
    old.voice("Ann", 0)
    old.audio(0)
    old.audio(1)  # of a deleted voice, whose server was killed
    old.encoding(1)
    take_over()
    assert traces(directory, address(1)) == []


def test_inline_clips_stay_inline_and_registered_ones_become_one(old, take_over):
    old.voice("Ann", 0)
    old.audio(0, "inline")
    old.encoding(0, "inline")
    old.encoding(0, "registered")
    old.audio(1, "inline")
    old.encoding(1, "inline")
    old.encoding(2, "inline")  # of which the audio was evicted
    store = take_over()
    usage = store.catalogue.usage()
    assert usage[REGISTERED]["audio"].num_files == 1
    assert usage[REGISTERED]["encodings"].num_files == 1
    assert usage[INLINE]["audio"].num_files == 1
    assert usage[INLINE]["encodings"].num_files == 2


def test_the_oldest_of_what_was_taken_over_goes_first(old, directory):
    for number in (2, 0, 1):
        old.audio(number, "inline")
    old.close()
    store = opened(directory, inline_audio_max_bytes=26_000)
    store.keep_inline(clip(5))
    assert [n for n in range(6) if store.has_audio(address(n))] == [1, 2, 5]
    assert store.verify() == []
    store.close()


def test_an_embedding_is_taken_over(old, take_over):
    values = np.array([0.5, -1.0], "<f4").tobytes()
    columns = {"audio_sha256": None, "embedding": values}
    old.voice("Ann", 0, num_samples=0, sample_rate_hz=0, **columns)
    store = take_over()
    assert store.catalogue.speaker_embedding(store.find("Ann").record) == (0.5, -1.0)


def test_names_that_are_refused_today_are_taken_over(old, take_over):
    old.voice("default", 0)
    old.audio(0)
    assert take_over().find("default") is not None


def test_what_is_known_of_stocks_files_is_taken_over(old, take_over, directory):
    from safetensors.numpy import save_file

    def write(name: str) -> tuple[str, int, int]:
        path = directory / f"{name}_5.safetensors"
        metadata = {"name": name, "created_at": "5", "sample_rate": "24000"}
        audio = {"audio": np.full(24_000, 0.1, np.float32)}
        save_file(audio, path, metadata=metadata)
        return path.name, path.stat().st_mtime_ns, path.stat().st_size

    insert = "INSERT INTO imported_file VALUES (?, ?, ?, ?, 5.0, ?)"
    old.db.execute(insert, (*write("ann"), "ann", None))
    old.db.execute(insert, (*write("bob"), "bob", 9.0))  # deleted since
    old.voice("ann", 0)
    old.audio(0)
    write("cid")
    store = take_over()
    assert store.catalogue.names(Page(limit=9)) == ["ann", "cid"]
    delete(store, "ann")
    assert sorted(path.name for path in directory.glob("*.safetensors")) == [
        "bob_5.safetensors",
        "cid_5.safetensors",
    ]


def test_a_log_that_was_not_written_back_counts(old, directory):
    old.voice("Ann", 0)
    old.audio(0)
    # Killed: what it committed is in the log only.
    names = ("registry.sqlite3", "registry.sqlite3-wal")
    left = {name: (directory / name).read_bytes() for name in names}
    assert len(left["registry.sqlite3-wal"]) > 0
    old.close()
    for name, data in left.items():
        (directory / name).write_bytes(data)
    store = opened(directory)
    assert store.find("Ann") is not None
    store.close()


@pytest.mark.parametrize("num_batches", [0, 1, 2])
def test_an_interrupted_takeover_goes_on(old, directory, monkeypatch, num_batches):
    for number in range(5):
        old.voice(f"{number}", number)
        old.audio(number)
        old.encoding(number)
    old.close()
    monkeypatch.setattr(takeover, "_PER_BATCH", 3)
    take, taken = takeover._take_files, []

    def stop(*args):
        if len(taken) == num_batches:
            raise OSError("killed")
        taken.append(take(*args))
        return taken[-1]

    with monkeypatch.context() as patched:
        patched.setattr(takeover, "_take_files", stop)
        with pytest.raises(StorageError):
            opened(directory)
    store = opened(directory)
    assert store.verify() == []
    for number in range(5):
        assert found(store, f"{number}").fingerprints == {"e" * 64}
    store.close()


def test_an_interrupted_takeover_is_shown(old, directory, monkeypatch):
    store = opened(directory.parent / "other")
    (store.directory / "storage.lock").touch()
    assert any("earlier version" in line for line in store.verify())
    store.close()
    old.close()


def test_what_came_back_after_a_downgrade_is_taken_over_too(old, take_over, directory):
    old.voice("Ann", 0)
    old.audio(0)
    store = take_over()
    publish(store)
    (again := OldLayout(directory)).voice("Bob", 1)
    again.audio(1)
    again.voice("ann", 2)  # a name that is registered here stays what it is
    again.audio(2)
    again.close()
    other = opened(directory)
    ann, bob = found(other, "Ann").record, found(other, "Bob").record
    assert ann == found(store, "Ann").record
    assert bob.generation != ann.generation
    assert other.read_audio(address(1)) is not None
    assert not other.has_audio(address(2))
    other.close()


def test_a_registry_that_cannot_be_read_is_left_alone(old, directory):
    old.audio(0)
    old.close()
    (directory / "registry.sqlite3").write_bytes(b"RIFF" * 2000)
    with pytest.raises(StorageError, match="registry"):
        opened(directory)
    assert (directory / "audio").exists()
    assert (directory / "registry.sqlite3").exists()


def test_a_registry_of_a_later_version_is_refused(old, directory):
    old.db.execute("PRAGMA user_version = 2")
    old.close()
    with pytest.raises(StorageError, match="schema 2"):
        opened(directory)
    with sqlite3.connect(directory / "registry.sqlite3") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (2,)
    db.close()


def test_a_large_directory_is_taken_over_quickly_and_says_how_far_it_is(
    old, take_over, monkeypatch, plugin_log
):
    monkeypatch.setattr(takeover, "_PER_BATCH", 100)
    monkeypatch.setattr(takeover, "_LOG_INTERVAL_SECONDS", 0.0)
    for number in range(300):
        old.voice(f"{number}", number)
        old.audio(number)
    began = time.monotonic()
    store = take_over()
    assert time.monotonic() - began < 20
    assert store.catalogue.count() == 300
    assert "Took over 300 voices and 300 files" in plugin_log.text
    assert "200 files so far" in plugin_log.text
