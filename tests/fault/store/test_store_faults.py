"""A damaged or unwilling disk: what is served is right or nothing."""

import errno
import os
import resource
import sqlite3
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from tests.encoding_samples import assert_same, make_encoding
from tests.limits import limited
from tests.store_samples import (
    address,
    clip,
    delete,
    key,
    opened,
    path_of,
    publish,
    register,
    traces,
)
from vllm_tts_cache import errors
from vllm_tts_cache.catalogue import sqlite
from vllm_tts_cache.catalogue.sqlite import FILE_NAME
from vllm_tts_cache.files import BALLAST, BALLAST_BYTES, write_private

KIND = "e" * 64


@pytest.fixture
def store(tmp_path):
    """Holds a voice with an encoding, and is sound when the test ends."""
    store = opened(tmp_path)
    register(store, "Ann")
    publish(store)
    yield store
    assert store.verify() == []
    assert store.recover() == []
    store.close()


@contextmanager
def no_free_descriptor():
    spare = os.dup(0)
    os.close(spare)
    with limited(resource.RLIMIT_NOFILE, spare):
        yield


def no_space(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def everything(store):
    return {path for path in store.files.store.rglob("*") if path.is_file()}


def flips(path, offsets):
    """Flip one byte after the other; the file is whole again when this ends."""
    good = path.read_bytes()
    for offset in offsets:
        byte = bytes([good[offset] ^ 0xFF])
        path.write_bytes(good[:offset] + byte + good[offset + 1 :])
        yield
    path.write_bytes(good)


def test_no_flipped_byte_of_an_encoding_is_ever_served(store):
    path = path_of(store, 0, KIND)
    for _ in flips(path, range(path.stat().st_size)):
        with pytest.raises(errors.EncodingCorruptError):
            store.read(key())
        assert store.read(key()) is None, "it stands for a good one"


def test_no_flipped_byte_of_audio_is_ever_served_and_none_is_removed(store):
    path, record = path_of(store), store.find("Ann").record
    for _ in flips(path, [*range(300), *range(300, path.stat().st_size, 97)]):
        before = path.read_bytes()
        for _ in range(2):
            with pytest.raises(errors.SourceCorruptError):
                store.read_audio(address())
        assert store.is_lost(record)
        assert path.read_bytes() == before
    assert not store.is_lost(record)
    assert store.read_audio(address()) is not None


def test_registering_a_clip_again_heals_damage_that_nobody_has_read(store):
    for failed in (key(0, "f"), key(0, "f"), key(0)):  # no row of what is stored
        store.note_failed(failed, "no encoder takes it")
    assert [*store.failures(address())] == ["f" * 64]
    path = path_of(store)
    path.write_bytes(path.read_bytes()[:-5] + b"fives")
    register(store, "Bob")
    assert store.failures(address()) == {}  # of the damaged file
    assert store.verify() == []
    assert store.read_audio(address()) is not None


def test_repair_removes_damaged_encodings_and_says_that_audio_is_lost(store):
    for kind in (KIND, "audio"):
        path = path_of(store, 0, kind)
        path.write_bytes(path.read_bytes()[:-5] + b"fives")
    removed = f"{address()}: removed a damaged encoding by {KIND[:16]}"
    assert store.repair() == [removed]
    assert store.find("Ann").fingerprints == frozenset()
    (problem,) = store.verify()
    assert problem.startswith(f"corrupt: {path}")
    assert store.is_lost(store.find("Ann").record)
    register(store, "Ann")


def test_what_cannot_be_tidied_up_makes_no_error_of_what_was_done(store, monkeypatch):
    """It was registered, and answered with a 500."""

    def unwilling(*_args, **_kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", unwilling)
        register(store, "Bob", 1)
        assert publish(store, 1)
    assert store.read_audio(address(1)) is not None


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, -1])
def test_truncated_files_can_be_stored_again(store, length):
    for kind in ("audio", KIND):
        path = path_of(store, 0, kind)
        os.truncate(path, length if length >= 0 else path.stat().st_size - 1)
    with pytest.raises(errors.SourceCorruptError):
        store.read_audio(address())
    with pytest.raises(errors.EncodingCorruptError):
        store.read(key())
    assert store.is_lost(store.find("Ann").record)
    register(store, "Ann")
    publish(store)
    assert_same(store.read(key()), make_encoding())
    assert store.read_audio(address()) is not None


def test_a_symlink_loop_is_reported_and_left_alone(store):
    # Root ignores permission bits, so taking them away would not fail here.
    for path, call in (
        (path_of(store, 0, KIND), lambda: store.read(key())),
        (path_of(store), lambda: store.read_audio(address())),
    ):
        saved = path.rename(store.directory / "saved")
        path.symlink_to(path)
        with pytest.raises(errors.StorageError, match="symbolic links"):
            call()
        assert path.is_symlink()
        saved.replace(path)
        call()


@pytest.mark.sqlite
def test_running_out_of_descriptors_costs_nothing_but_the_call(store):
    fresh = opened(store.directory)
    fresh.database.close()
    with no_free_descriptor():
        for call in (
            lambda: store.read(key()),
            lambda: store.read_audio(address()),
            lambda: store.store_inline(clip(1)),
            lambda: publish(store),
            store.recover,
            store.verify,
            lambda: opened(store.directory),
        ):
            with pytest.raises(errors.StorageError):
                call()
    assert_same(store.read(key()), make_encoding())
    assert store.read_audio(address()) is not None


@pytest.mark.sqlite
def test_a_clip_that_is_there_is_used_although_nobody_can_note_it(store, monkeypatch):
    """Another process holds the catalogue for longer than a writer waits."""
    store.store_inline(clip(1))
    connect = sqlite._connect
    monkeypatch.setattr(sqlite, "_connect", lambda path, _: connect(path, 0.1))
    impatient = opened(store.directory)
    path = store.directory / FILE_NAME
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        impatient.store_inline(clip(1))
        with pytest.raises(errors.StorageBusyError):
            impatient.store_inline(clip(2))
        holder.execute("ROLLBACK")
    impatient.close()


@pytest.mark.parametrize(
    ("where", "moment"), [(os, "fsync"), (Path, "mkdir"), (Path, "replace")]
)
def test_a_full_disk_changes_nothing(store, monkeypatch, where, moment):
    before = everything(store)
    # The last one needs no new directory.
    calls = [
        lambda: register(store, "Bob", 1),
        lambda: register(store, "Ann", 1),
        lambda: store.store_inline(clip(1)),
        lambda: publish(store, 0, "f"),
    ][: 3 if moment == "mkdir" else 4]
    with monkeypatch.context() as patched:
        patched.setattr(where, moment, no_space)
        for call in calls:
            with pytest.raises(errors.StorageFullError):
                call()
    assert everything(store) == before
    assert store.find("Bob") is None
    assert store.find("Ann").record.audio_sha256 == address(0)
    register(store, "Bob", 1)


def sqlite_full():
    """As the driver raises it."""
    error: Any = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = 13
    return error


def test_a_catalogue_that_cannot_commit_leaves_no_file(store, monkeypatch, engine):
    from psycopg.errors import DiskFull

    is_file = engine == "sqlite"
    engine = store.database.backend.writing
    before = everything(store)
    commit = engine.dialect.do_commit
    failed = []

    def fail(connection):
        if not failed:
            failed.append(connection)
            raise OperationalError(
                "COMMIT", {}, sqlite_full() if is_file else DiskFull()
            )
        commit(connection)

    monkeypatch.setattr(engine.dialect, "do_commit", fail)
    kind = "Full" if is_file else "Unavailable"
    with pytest.raises(getattr(errors, f"Storage{kind}Error")):
        register(store, "Bob", 1)
    assert everything(store) == before
    assert store.find("Bob") is None


@pytest.mark.sqlite
def test_on_a_full_disk_what_frees_space_has_the_ballast(store, monkeypatch):
    """No voice could be deleted, which would have freed space."""
    dialect, ballast = store.database.backend.writing.dialect, store.directory / BALLAST
    store.store_inline(clip(1))
    store.sweep()
    commit = dialect.do_commit

    def commit_if_there_is_room(connection):
        if ballast.stat().st_size > BALLAST_BYTES // 4:
            raise OperationalError("COMMIT", {}, sqlite_full())
        commit(connection)

    monkeypatch.setattr(dialect, "do_commit", commit_if_there_is_room)
    with pytest.raises(errors.StorageFullError):
        register(store, "Bob", 2)
    assert ballast.stat().st_size == BALLAST_BYTES
    delete(store, "Ann")
    assert traces(store.files.store, address(0)) == []
    assert ballast.stat().st_size == BALLAST_BYTES // 4
    ballast.write_bytes(b"")
    monkeypatch.undo()
    store.sweep()
    assert ballast.stat().st_size == BALLAST_BYTES
    register(store, "Ann")


def test_a_file_size_limit_is_a_full_disk_and_leaves_nothing_behind(store):
    before = everything(store)
    staged = store.files.stage(b"", address(0), "audio")
    store.files.unstage(staged)
    with limited(resource.RLIMIT_FSIZE, 100), pytest.raises(errors.StorageFullError):
        store.files.stage(b"x" * 1000, address(0), "audio")
    assert everything(store) == before
    assert list(staged.path.parent.iterdir()) == []


@pytest.mark.parametrize(("where", "moment"), [(Path, "rename"), (os, "unlink")])
def test_a_deletion_that_removes_none_is_unfinished(store, monkeypatch, where, moment):
    """Neither put them into the trash, nor empty that."""
    deletion = store.registrations.delete("Ann")
    with monkeypatch.context() as patched:
        patched.setattr(where, moment, no_space)
        with pytest.raises(errors.StorageError):
            store.remove_files(deletion)
    progress = store.progress("Ann")
    assert (progress.files_removed, store.find("Ann")) == (False, None)
    assert len(store.verify()) >= 1
    store.remove_files(deletion)
    assert store.progress("Ann").is_finished
    assert traces(store.directory, address()) == []
    assert not any(store.directory.glob("trash/*"))


def test_an_eviction_that_fails_does_not_fail_what_was_stored(tmp_path, monkeypatch):
    small = opened(tmp_path / "small", inline_audio_max_bytes=9_000)
    small.store_inline(clip(1))

    def fail(*_):
        raise errors.StorageError("a file that cannot be removed")

    with monkeypatch.context() as patched:
        patched.setattr(small.files, "remove", fail)
        small.store_inline(clip(2))
    assert small.has_audio(address(2))
    small.store_inline(clip(3))
    assert [n for n in (1, 2, 3) if small.has_audio(address(n))] == [3]
    assert small.verify() == []
    small.close()


def test_a_deletion_that_cannot_be_finished_stops_no_others(store, monkeypatch):
    register(store, "Bob", 1)
    deletions = [store.registrations.delete("Ann"), store.registrations.delete("Bob")]
    discard = store.files.discard

    def fail_once(sha, deletion_id):
        if deletion_id == deletions[0].id:
            raise errors.StorageError("one bad sector")
        discard(sha, deletion_id)

    with monkeypatch.context() as patched:
        patched.setattr(store.files, "discard", fail_once)
        with pytest.raises(errors.StorageError, match="bad sector"):
            store.recover()
    assert store.unfinished_deletions() == deletions[:1]
    assert store.progress("Bob").is_finished
    store.recover()
    for number in (0, 1):
        assert traces(store.directory, address(number)) == []


def test_trash_that_somebody_empties_meanwhile_is_no_failure(store, monkeypatch):
    rename, emptied = Path.rename, []

    def empty_first(path, target):
        if "trash" in target.parts and not emptied:
            emptied.append(target)
            store.files.empty_trash()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", empty_first)
    store.remove_files(store.registrations.delete("Ann"))
    assert emptied
    assert traces(store.directory, address()) == []


def test_what_is_half_written_has_no_name_that_anybody_reads(store, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        with pytest.raises(OSError):
            write_private(store.directory, b"x")
    delete(store, "Ann")
    assert everything(store) == set()


def test_a_new_directory_is_made_durable_in_its_parent(store, monkeypatch):
    synced, fsync = [], os.fsync

    def note(handle):
        synced.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    register(store, "Bob", 1)
    directory = path_of(store, 1).parent
    for path in (directory, directory.parent, store.files.store):
        assert str(path) in synced
