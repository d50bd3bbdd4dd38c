"""The catalogue when its file or its disk fails, or somebody holds it."""

import multiprocessing
import signal
import sqlite3
import time
from contextlib import closing, contextmanager

import pytest
from sqlalchemy import select, text

from tests.store_samples import delete, opened, register, settings_of, voice
from vllm_tts_cache.catalogue import schema, sqlite
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.sqlite import BUSY_SECONDS, SqliteFile
from vllm_tts_cache.errors import StorageBusyError, StorageError, StorageFullError
from vllm_tts_cache.store.opening import open_existing, open_store

pytestmark = pytest.mark.sqlite
FORK = multiprocessing.get_context("fork")
FILE = "catalogue.sqlite3"


@contextmanager
def held(directory):
    """Somebody else writes, for as long as the block runs."""
    with closing(sqlite3.connect(directory / FILE, isolation_level=None)) as holder:
        yield holder
        holder.execute("ROLLBACK")


@pytest.mark.parametrize("other", [1, schema.VERSION + 1])
def test_another_schema_is_refused_and_left_alone(tmp_path, other):
    store = opened(tmp_path)
    with store.database.write() as db:
        db.execute(schema.schema_version.update().values(version=other))
    store.close()
    before = (tmp_path / FILE).read_bytes()
    message = f"has schema {other}.*SPEAKER_SAMPLES_DIR to an empty directory"
    for open_ in (open_store, open_existing):
        with pytest.raises(StorageError, match=message):
            open_(settings_of(tmp_path))
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize("content", [b"RIFF" * 1024, b"\0" * 4096])
def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(StorageError, match=r"voice catalogue .*move it away"):
        opened(tmp_path)
    assert (tmp_path / FILE).read_bytes() == content


def test_a_damaged_page_is_a_storage_error(tmp_path):
    store = opened(tmp_path)
    for n in range(100):
        store.registrations.register(voice(f"{n}", None, description="x" * 100), None)
    store.close()
    data = bytearray((tmp_path / FILE).read_bytes())
    # The first pages tell of the tables, the last ones of voices.
    first = len(data) - 8 * 4096
    data[first:] = b"\xff" * (len(data) - first)
    (tmp_path / FILE).write_bytes(data)
    store = opened(tmp_path, import_stock=False)
    with pytest.raises(StorageError, match=r"malformed.*backup"):
        for n in range(100):
            store.find(f"{n}")
    with pytest.raises(StorageError):
        store.registrations.register(voice("7", None), None)
    store.close()


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch):
    connect = sqlite3.connect

    def limited(*args, **kwargs):
        db = connect(*args, **kwargs)
        db.execute("PRAGMA max_page_count = 90")
        return db

    monkeypatch.setattr(sqlite3, "connect", limited)
    store = opened(tmp_path)
    registered = []
    with pytest.raises(StorageFullError):
        for n in range(1000):
            new = voice(f"{n:03d}", None, description="x" * 2000)
            registered.append(store.registrations.register(new, None).record)
    assert registered
    with pytest.raises(StorageFullError):
        register(store, "000", ref_text="x" * 100_000, taken_over=True)
    assert store.records(Page(limit=1000)) == registered
    assert store.verify() == []
    delete(store, "000")
    delete(store, "001")
    register(store, "000", 0)
    assert store.verify() == []
    store.close()


def test_a_catalogue_that_another_process_holds_is_waited_for(tmp_path):
    held = FORK.Event()
    opened(tmp_path).close()

    def hold() -> None:
        db = sqlite3.connect(tmp_path / FILE, isolation_level=None)
        db.execute("BEGIN IMMEDIATE")
        held.set()
        signal.sigtimedwait([], 0.5)
        db.execute("COMMIT")
        db.close()

    process = FORK.Process(target=hold)
    process.start()
    assert held.wait(10)
    assert BUSY_SECONDS > 5
    store = opened(tmp_path)
    register(store, "ana")
    process.join()
    assert store.verify() == []
    store.close()


def test_a_catalogue_held_for_too_long_is_busy_and_reads_go_on(store, monkeypatch):
    register(store, "ana")
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.1)
    impatient = Database(SqliteFile(store.directory / FILE), store.directory)
    with held(store.directory) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageBusyError) as caught, impatient.write() as db:
            db.execute(text("SELECT 1"))
        assert caught.value.retry_after_seconds > 0
        began = time.monotonic()
        assert store.find("ana") is not None
        assert time.monotonic() - began < 1
    impatient.close()


def test_a_look_on_the_event_loop_does_not_wait_for_a_locked_file(tmp_path):
    store = opened(tmp_path)
    register(store, "ana")
    store.close()
    with held(tmp_path) as holder:
        holder.execute("PRAGMA locking_mode = EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        catalogue = Database(SqliteFile(tmp_path / FILE), tmp_path)
        began = time.monotonic()
        with pytest.raises(StorageBusyError):
            catalogue.first_at_once(select(schema.speaker.c.name), {})
        assert time.monotonic() - began < 2
    catalogue.close()


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        opened(tmp_path / "file" / "voices")
