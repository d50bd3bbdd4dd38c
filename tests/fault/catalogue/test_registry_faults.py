"""The registry when its process, its file or its disk fails."""

import multiprocessing
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from vllm_tts_cache.catalogue.record import NewSpeaker
from vllm_tts_cache.catalogue.registry import Registry
from vllm_tts_cache.catalogue.sqlite import BUSY_SECONDS, MIGRATIONS
from vllm_tts_cache.errors import StorageError, StorageFullError

FORK = multiprocessing.get_context("fork")


def open_registry(path: Path) -> Registry:
    return Registry(path, max_speakers=0, policy="overwrite")


def speaker(name: str, audio: str = "a", **fields) -> NewSpeaker:
    given: dict[str, Any] = {"audio_sha256": audio, "num_samples": 1}
    given |= {"sample_rate_hz": 1, "consent": "yes"} | fields
    return NewSpeaker(name=name, **given)


@pytest.fixture
def on_connect(monkeypatch):
    """Runs a function on every connection that is opened from now on."""
    connect = sqlite3.connect

    def install(prepare) -> None:
        def prepared(*args, **kwargs) -> sqlite3.Connection:
            db = connect(*args, **kwargs)
            prepare(db)
            return db

        monkeypatch.setattr(sqlite3, "connect", prepared)

    return install


@pytest.mark.parametrize("statement", ["DELETE FROM", "INSERT INTO speaker", "COMMIT"])
def test_a_kill_while_registering_leaves_the_old_row(tmp_path, on_connect, statement):
    path = tmp_path / "voices.sqlite3"
    with open_registry(path) as registry:
        old = registry.register(speaker("ana", "old")).record

    def kill(sql: str) -> None:
        if sql.strip().startswith(statement):
            os.kill(os.getpid(), signal.SIGKILL)

    def register() -> None:
        on_connect(lambda db: db.set_trace_callback(kill))
        open_registry(path).register(speaker("ana", "new"))

    process = FORK.Process(target=register)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with open_registry(path) as registry:
        assert registry.list(limit=9) == [old]
        new = registry.register(speaker("ana", "new")).record
        assert new.generation > old.generation
        assert registry.verify() == []


def test_a_schema_newer_than_ours_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "voices.sqlite3"
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
        db.execute("CREATE TABLE of_tomorrow (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StorageError, match=r"newer vllm-tts-cache.*Upgrade"):
        open_registry(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"RIFF" * 1024, b"\0" * 4096])
def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "voices.sqlite3"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"voice registry .*move it away"):
        open_registry(path)
    assert path.read_bytes() == content


def test_a_damaged_page_is_a_storage_error_and_verify_finds_it(tmp_path):
    path = tmp_path / "voices.sqlite3"
    with open_registry(path) as registry:
        for n in range(200):
            registry.register(speaker(f"{n}", description="x" * 100))
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with open_registry(path) as registry:
        with pytest.raises(StorageError, match=r"malformed.*backup"):
            registry.get("7")
        with pytest.raises(StorageError):
            registry.register(speaker("7"))


def test_a_full_disk_changes_nothing(tmp_path, on_connect):
    path = tmp_path / "voices.sqlite3"
    on_connect(lambda db: db.execute("PRAGMA max_page_count = 24"))
    with open_registry(path) as registry:
        registered = []
        with pytest.raises(StorageFullError) as caught:
            for n in range(1000):
                new = speaker(f"{n:03d}", description="x" * 2000)
                registered.append(registry.register(new).record)
        assert caught.value.path == str(path)
        assert registered
        with pytest.raises(StorageFullError):
            registry.register(speaker("000", ref_text="x" * 100_000))
        assert registry.list(limit=1000) == registered
        assert registry.verify() == []
        assert registry.delete("000") == registered[0]
        registry.register(speaker("000", description="x" * 2000))


def test_a_registry_that_another_process_holds_is_waited_for(tmp_path):
    path, held = tmp_path / "voices.sqlite3", FORK.Event()
    open_registry(path).close()

    def hold() -> None:
        db = sqlite3.connect(path, isolation_level=None)
        db.execute("BEGIN IMMEDIATE")
        held.set()
        signal.sigtimedwait([], 0.5)
        db.execute("COMMIT")
        db.close()

    process = FORK.Process(target=hold)
    process.start()
    assert held.wait(10)
    assert BUSY_SECONDS > 5
    with open_registry(path) as registry:
        registry.register(speaker("ana"))
    process.join()


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        open_registry(tmp_path / "file" / "voices.sqlite3")
