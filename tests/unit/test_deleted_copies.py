"""Copies of deleted audio go on a thread of their own; whoever asks is told when."""

import threading

import pytest

from tests.waiting import Clock, wait_until
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.model_executor.speakers import DeletedCopies
from vllm_tts_cache.store.directory import StoreDirectory

ONE, OTHER, LAST = "1" * 64, "2" * 64, "f" * 64


@pytest.fixture
def copies(tmp_path):
    directory = StoreDirectory(tmp_path)
    yield directory
    directory.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def deleted(copies, clock):
    deleted = DeletedCopies(copies, clock)
    yield deleted
    deleted.close()


def write(copies, sha):
    copies.place(copies.stage(b"voice", sha, "audio"))


def removed(deleted, copies, *shas):
    """Wait until audios are gone, and the thread has written down that they are."""
    write(copies, LAST)
    assert deleted.remaining([LAST]) == [LAST]  # it begins when those before it ended
    wait_until(lambda: not any(copies.has_any(sha) for sha in (*shas, LAST)))


def threads():
    return {t for t in threading.enumerate() if t.name.startswith("tts-cache-copies")}


def test_where_nothing_is_nothing_remains_and_no_thread_starts(deleted):
    before = threads()
    assert deleted.remaining([ONE, OTHER]) == []
    assert threads() == before


def test_what_remains_is_told_and_is_gone_a_moment_later(deleted, copies):
    write(copies, ONE)
    assert deleted.remaining([ONE, OTHER]) == [ONE]
    removed(deleted, copies, ONE)
    assert deleted.remaining([ONE, OTHER]) == []


def test_what_the_disk_does_not_show_holds_up_no_other(deleted, copies, monkeypatch):
    """One audio failed the call for all others, and so every deletion of a fleet."""

    def broken(sha, has_any=copies.has_any):
        if sha == ONE:
            raise StorageError("Input/output error")
        return has_any(sha)

    monkeypatch.setattr(copies, "has_any", broken)
    write(copies, OTHER)
    assert deleted.remaining([ONE, OTHER]) == [ONE, OTHER]
    removed(deleted, copies, OTHER)
    assert deleted.remaining([OTHER]) == []


def test_an_empty_directory_and_other_files_hold_nothing_up(deleted, copies, tmp_path):
    for sha, names in ((ONE, ()), (OTHER, ("audio.safetensors~", "note"))):
        directory = tmp_path / "store" / sha[:2] / sha
        directory.mkdir(parents=True)
        for name in names:
            (directory / name).write_bytes(b"voice")
    assert deleted.remaining([ONE, OTHER]) == [ONE, OTHER]
    removed(deleted, copies, ONE, OTHER)
    assert deleted.remaining([ONE, OTHER]) == []


def test_a_voice_in_use_whose_copies_come_back_holds_up_nobody(deleted, copies, clock):
    write(copies, ONE)
    assert deleted.remaining([ONE]) == [ONE]
    removed(deleted, copies, ONE)
    write(copies, ONE)
    assert deleted.remaining([ONE]) == []
    assert copies.has_any(ONE)
    assert deleted.remaining([ONE]) == [ONE], "that is another deletion"


def test_a_caller_that_died_leaves_nothing_to_the_next_deletion(deleted, copies, clock):
    write(copies, ONE)
    assert deleted.remaining([ONE]) == [ONE]
    removed(deleted, copies, ONE)
    write(copies, ONE)
    clock.now += 60.0
    assert deleted.remaining([ONE]) == [ONE]
