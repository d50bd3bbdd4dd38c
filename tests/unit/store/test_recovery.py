import logging
import os
import shutil
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.store_samples import (
    address,
    clip,
    opened,
    path_of,
    publish,
    register,
    settings_of,
    traces,
)
from vllm_tts_cache.catalogue import stored_files
from vllm_tts_cache.store import recovery
from vllm_tts_cache.store.opening import open_existing


def everything(directory):
    paths = (p for p in directory.rglob("*") if not p.name.endswith(("-wal", "-shm")))
    return {path: path.is_file() and path.read_bytes() for path in paths}


@pytest.mark.every_backend
@pytest.mark.directory
def test_files_that_nobody_has_are_shown_and_removed(store):
    register(store, "Ann", 0)
    orphan = path_of(store, 1)
    shutil.copytree(path_of(store, 0).parent, orphan.parent)
    extra = path_of(store, 0, "f" * 64)
    shutil.copy(path_of(store, 0), extra)
    problems = store.verify()
    assert any(f"{address(1)}: its audio has no row" in line for line in problems)
    assert any(f"{address(0)}: its encoding by" in line for line in problems)
    assert len(store.recover()) == 2
    assert not orphan.parent.exists()
    assert not extra.exists()
    assert store.read_audio(address(0)) is not None


@pytest.mark.every_backend
@pytest.mark.directory
def test_rows_without_a_file_are_shown_and_deleted(store):
    register(store, "Ann", 0)
    publish(store, 0)
    store.store_inline(clip(1))
    path_of(store, 1).unlink()
    path_of(store, 0, "e" * 64).unlink()
    assert len(store.verify()) == 2
    assert len(store.recover()) == 2
    assert store.find("Ann").fingerprints == frozenset()
    assert not store.has_audio(address(1))


@pytest.mark.directory
def test_a_voice_whose_audio_is_gone_is_shown_until_it_is_registered_again(store):
    record = register(store, "Ann").record
    publish(store)
    path_of(store).unlink()
    assert store.recover() == []
    assert store.verify() == [f"audio {address()}: its audio is not there"]
    assert store.is_lost(record)
    register(store, "Ann")
    assert store.read_audio(address()) is not None
    assert store.find("Ann").fingerprints == {"e" * 64}


@pytest.mark.every_backend
def test_an_unfinished_deletion_is_shown_and_finished(store):
    register(store, "Ann")
    publish(store)
    deletion = store.registrations.delete("Ann")
    assert store.unfinished_deletions() == [deletion]
    problems = store.verify()
    assert f"deletion {deletion.id}: not finished" in problems
    assert any(address() in line for line in problems)
    assert store.recover() == [f"finished deletion {deletion.id}"]
    assert traces(store.directory, address()) == []
    assert store.progress("Ann").is_finished


@pytest.mark.every_backend
def test_what_is_in_the_trash_is_shown_and_removed(store):
    register(store, "Ann")
    left = store.directory / "trash" / "7" / "x"
    left.mkdir(parents=True)
    (left / "audio.safetensors").write_bytes(b"of somebody")
    assert store.verify() == [f"left behind: {left}"]
    store.recover()
    assert not left.exists()


@pytest.mark.every_backend
def test_what_a_dead_process_was_writing_is_shown_and_removed(store):
    if (child := os.fork()) == 0:
        store.files.stage(b"half a voice", address(0), "audio")
        os._exit(0)
    os.waitpid(child, 0)
    assert len(store.verify()) == 1
    assert store.recover() == ["removed 1 half-written files"]


@pytest.mark.every_backend
def test_what_a_living_process_is_writing_is_neither(store, open_here):
    other = open_here()
    staged = other.files.stage(b"half a voice", address(0), "audio")
    assert store.verify() == []
    assert store.recover() == []
    assert staged.path.exists()
    other.files.unstage(staged)


@pytest.mark.every_backend
def test_what_another_program_tidied_up_is_made_again(store):
    """Every write of a server failed until it was restarted."""
    register(store, "Ann")
    shutil.rmtree(store.files.partial)
    register(store, "Bea", 1)


@pytest.mark.every_backend
def test_registered_files_that_no_speaker_has_are_removed(store):
    with store.database.write() as db:
        its: Any = {"audio_sha256": address(3), "artifact": "audio", "num_bytes": 5}
        row = stored_files.StoredFile(**its, segment=stored_files.Segment.REGISTERED)
        stored_files.put(db, row, None)
    path_of(store, 3).parent.mkdir(parents=True)
    path_of(store, 3).write_bytes(b"12345")
    assert store.verify() != []
    assert any(address(3) in line for line in store.recover())
    assert not path_of(store, 3).exists()


@pytest.mark.every_backend
def test_sums_that_are_wrong_are_shown_and_put_right(store):
    register(store, "Ann")
    with store.database.write() as db:
        db.execute(stored_files.usage.update().values(num_bytes=1))
    assert len(store.verify()) == 1
    assert len(store.recover()) == 1


@pytest.mark.directory
def test_what_was_recovered_is_counted_in_one_line(store, caplog, monkeypatch):
    """Where a disk had lost the catalogue there was a line for each of its files."""
    monkeypatch.setattr(recovery.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(recovery.logger, "propagate", False)
    caplog.set_level(logging.DEBUG, recovery.logger.name)
    register(store, "Ann", 9)
    store.registrations.delete("Ann")
    for number in range(3):
        store.store_inline(clip(number))
        path_of(store, number).unlink()
    publish(store, 2)
    path_of(store, 2, "e" * 64).unlink(missing_ok=True)
    recovery.recover_aside(store.recover).join()
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    details = [r for r in caplog.records if r.levelno == logging.DEBUG]
    kinds = "3 x deleted the rows of files that are not there; 1 x finished deletion"
    assert told == [f"Recovered: {kinds}."]
    assert len(details) == 4


@pytest.mark.directory
def test_verify_reads_every_file(store):
    register(store, "Ann")
    publish(store)
    for kind in ("audio", "e" * 64):
        path = path_of(store, 0, kind)
        good = path.read_bytes()
        path.write_bytes(good[:-4] + b"four")
        (problem,) = store.verify()
        assert problem.startswith(f"corrupt: {path}")
        path.write_bytes(good)
    path.write_bytes(good[:-4])
    assert len(store.verify()) == 2  # corrupt, and of another length than its row says
    path.write_bytes(good)


@pytest.mark.directory
def test_stray_files_are_shown_and_left(store):
    register(store, "Ann")
    strays = [
        path_of(store).with_suffix(".wav"),
        store.files.store / "notes.txt" / "x",
        store.files.store / "zz" / address(),
    ]
    for stray in strays:
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(b"?")
    assert len(store.verify()) == 3
    assert store.recover() == []
    for stray in strays:
        assert stray.exists()
        stray.unlink()


@pytest.mark.directory
def test_audio_that_comes_back_is_its_voices_again(store):
    """A disk that was away took its row along, and then the file was nobody's."""
    record = register(store, "Ann", 0).record
    folder = path_of(store, 0).parent
    folder.rename(store.directory / "away")
    assert store.recover() == []
    assert store.is_lost(record)
    (store.directory / "away").rename(folder)
    assert not store.is_lost(record)
    assert store.recover() == store.verify() == []
    assert store.read_audio(address(0)) is not None


@pytest.mark.every_backend
def test_recovering_keeps_what_is_registered_meanwhile(store, open_here, monkeypatch):
    other, look = open_here(), store.files.addresses

    def look_then_register(prefix):
        found = look(prefix)
        if not store.has_audio(address()):
            register(other, "Ann")
            publish(other)
        return found

    # Some directory, so that the walk has a part to look at.
    store.store_inline(clip(1))
    path_of(store).parent.parent.mkdir(exist_ok=True)
    monkeypatch.setattr(store.files, "addresses", look_then_register)
    assert store.recover() == []
    assert store.read_audio(address()) is not None


@pytest.mark.every_backend
def test_looking_at_a_directory_changes_nothing_and_imports_nothing(tmp_path):
    store = opened(tmp_path)
    register(store, "Ann")
    deletion = store.registrations.delete("Ann")
    register(store, "Bob", 1)
    store.close()
    metadata = {"name": "stock", "created_at": "5", "sample_rate": "24000"}
    audio = {"audio": np.full(24_000, 0.1, np.float32)}
    save_file(audio, tmp_path / "stock_5.safetensors", metadata=metadata)
    before = everything(tmp_path)
    looking = open_existing(settings_of(tmp_path))
    assert f"deletion {deletion.id}: not finished" in looking.verify()
    looking.close()
    assert everything(tmp_path) == before
