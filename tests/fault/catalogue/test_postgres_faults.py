"""The server is stopped, cut off, frozen, or not what the URL says."""

import logging
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import psycopg
import pytest
from sqlalchemy import text

from tests.store_samples import clip, key, opened, publish, register, settings_of
from tests.waiting import wait_until
from vllm_tts_cache.catalogue import leases, schema, stored_files
from vllm_tts_cache.catalogue import postgres as backend
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.errors import (
    ConfigError,
    InvalidSpeakerError,
    StorageError,
    StorageUnavailableError,
    TTSCacheError,
)
from vllm_tts_cache.store.opening import open_existing

pytestmark = pytest.mark.postgresql
SOON_SECONDS = 3.0
IDLE_SECONDS = 3  # on a busy machine a process may do nothing for one


@pytest.fixture
def empty(tmp_path):
    """A store that is sound when the test ends."""
    store = opened(tmp_path)
    yield store
    store.recover()
    assert store.verify() == []
    store.close()


@pytest.fixture
def store(empty):
    """Holds a voice with an encoding."""
    register(empty, "Ann", 0)
    publish(empty, 0)
    return empty


def finds(store) -> bool:
    with suppress(StorageUnavailableError):
        return store.find("Ann") is not None
    return False


def test_connections_that_were_cut_are_not_noticed(store, postgres):
    for _ in range(3):
        assert store.find("Ann") is not None
        assert postgres.cut() > 0
        assert store.find("Ann") is not None
        assert postgres.cut() > 0
        register(store, "Ann", 0)
        assert postgres.cut() > 0
        assert store.num_speakers() == 1


def test_a_transaction_that_is_cut_changes_nothing(store, postgres):
    database = store.database
    with pytest.raises(StorageUnavailableError) as caught, database.write() as db:
        db.execute(schema.speaker.update().values(name="Eve"))
        postgres.cut()
        db.execute(text("SELECT 1"))
    assert caught.value.was_cut_off
    assert store.find("Ann").record.name == "Ann"


def test_one_that_is_cut_at_commit_leaves_all_or_none(store, postgres, monkeypatch):
    engine = store.database.backend.writing
    commit = engine.dialect.do_commit
    cuts = iter([True])

    def cut_before(connection):
        if next(cuts, False):
            postgres.cut()
        commit(connection)

    monkeypatch.setattr(engine.dialect, "do_commit", cut_before)
    with pytest.raises(StorageUnavailableError):
        register(store, "Bob", 1)
    assert store.find("Bob") is None
    assert store.verify() == []
    register(store, "Bob", 1)


def test_a_server_that_is_stopped_is_said_so_at_once_and_comes_back(store, postgres):
    postgres.stop()
    try:
        for call in (
            lambda: store.find("Ann"),
            lambda: register(store, "Bob", 1),
            store.num_speakers,
            lambda: store.registrations.delete("Ann"),
        ):
            began = time.monotonic()
            with pytest.raises(StorageUnavailableError) as caught:
                call()
            assert time.monotonic() - began < SOON_SECONDS
            assert caught.value.retry_after_seconds > 0
            assert caught.value.was_cut_off
        assert store.read(key(0)) is not None  # a worker asks the directory alone
    finally:
        postgres.start()
    wait_until(lambda: finds(store))
    register(store, "Bob", 1)


def test_a_server_that_crashes_loses_nothing_that_was_told(store, postgres):
    register(store, "Bob", 1)
    postgres.stop(signal.SIGQUIT)
    postgres.start()
    wait_until(lambda: finds(store))
    assert store.find("Bob") is not None


def test_nobody_waits_for_ever_for_a_frozen_server(store, postgres, monkeypatch):
    short = property(lambda _: 0.5, lambda *_: None)
    monkeypatch.setattr(backend._PatientConnection, "patience_seconds", short)
    monkeypatch.setattr(backend, "CONNECT_SECONDS", 2)
    with postgres.frozen():
        for call in (lambda: store.find("Ann"), lambda: register(store, "Bob", 1)):
            began = time.monotonic()
            with pytest.raises(StorageUnavailableError):
                call()
            assert time.monotonic() - began < 6
    wait_until(lambda: finds(store))


@pytest.fixture
def brief_statements(monkeypatch):
    monkeypatch.setattr(backend, "STATEMENT_SECONDS", 1)


def test_a_statement_that_takes_too_long_is_ended(brief_statements, empty):
    database = empty.database
    with pytest.raises(StorageUnavailableError) as caught, database.read() as db:
        db.execute(text("SELECT pg_sleep(20)"))
    assert not caught.value.was_cut_off
    assert empty.find("nobody") is None


@pytest.fixture
def brief_turns(monkeypatch):
    monkeypatch.setattr(backend, "WRITE_TURN_SECONDS", 1)


@pytest.fixture
def turn(tmp_path, postgres):
    """Somebody has the turn, and gives it back once the block ends."""

    @contextmanager
    def taken():
        with psycopg.connect(postgres.url_of(tmp_path)) as holder:
            holder.execute(backend._TAKE_TURN)
            yield
            holder.rollback()

    return taken


def test_a_turn_that_is_had_for_too_long_is_not_waited_for(brief_turns, store, turn):
    with turn():
        with pytest.raises(StorageUnavailableError) as caught:
            register(store, "Bob", 1)
        assert "has been writing" in caught.value.log_text
        assert not caught.value.was_cut_off
        assert store.find("Ann") is not None
    register(store, "Bob", 1)


def test_writers_that_wait_keep_no_readers_or_leases(store, turn, postgres, tmp_path):
    """With nine of them all connections were theirs, for ten seconds."""
    mine = store.participants.join()
    waiting = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    )
    with ThreadPoolExecutor(12) as threads:
        with turn():
            writers = [threads.submit(register, store, f"v{n}", n) for n in range(12)]
            while postgres.query(waiting) != [2 * backend._NUM_CONNECTIONS]:
                time.sleep(0.02)
            began = time.monotonic()
            assert store.num_speakers() == 1
            assert store.find("Ann") is not None
            assert store.participants.deletions_to_confirm() == []
            with store.database.renewing() as db:
                assert leases.renew(db, mine)
            assert time.monotonic() - began < SOON_SECONDS
        for writer in writers:
            writer.result()
    assert store.num_speakers() == 13
    store.participants.leave()


def test_readers_leave_a_connection_to_the_lease(store):
    mine = store.participants.join()
    database = store.database
    with ExitStack() as readers:
        for _ in range(2 * backend._NUM_CONNECTIONS):
            readers.enter_context(database.read())
        with database.renewing() as db:
            assert leases.renew(db, mine)
    store.participants.leave()


def test_too_many_who_read_are_no_outage(brief_statements, empty):
    with ExitStack() as readers:
        for _ in range(2 * backend._NUM_CONNECTIONS):
            readers.enter_context(empty.database.read())
        with pytest.raises(StorageUnavailableError) as caught:
            empty.num_speakers()
    assert "in use" in caught.value.log_text
    assert not caught.value.was_cut_off


@contextmanager
def frozen_child(directory, act):
    """A process that ``act`` freezes; it goes on behind the block, cut off by then."""
    reader, writer = os.pipe()

    def freeze():
        os.write(writer, b".")
        os.kill(os.getpid(), signal.SIGSTOP)

    if (child := os.fork()) == 0:
        try:
            act(opened(directory), freeze)
        except StorageUnavailableError:
            os._exit(7)
        os._exit(0)
    os.close(writer)  # or the end of a child that never got there would not be seen
    assert os.read(reader, 1) == b"."
    yield
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_who_is_frozen_with_the_turn_changes_nothing(store, tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "IDLE_SECONDS", IDLE_SECONDS)
    ann = store.find("Ann").record

    def rename(mine, freeze):
        with mine.database.write() as db:
            db.execute(schema.speaker.update().values(name="Eve"))
            freeze()
            db.execute(text("SELECT 1"))

    with frozen_child(tmp_path, rename):
        register(store, "Bob", 1)
    assert store.records(Page(limit=1)) == [ann]


def test_another_schema_is_refused_and_left_alone(tmp_path):
    store = opened(tmp_path)
    other = schema.VERSION + 1
    with store.database.write() as db:
        db.execute(schema.schema_version.update().values(version=other))
    with pytest.raises(StorageError, match=f"has schema {other}.*an empty database"):
        opened(tmp_path)
    with store.database.read() as db:
        assert schema.stored_version(db) == other
    store.close()


# -------- at the start

WRONG = (
    ("postgresql://tests:s3cret@127.0.0.1:1/x", "cannot be opened.*Start PostgreSQL"),
    ("postgresql://tests:s3cret@nowhere.invalid/x", "cannot be opened"),
    ("postgresql://tests:s3%cret@host/x", r"expected postgresql://"),
    ("postgresql://tests:s3cret@host:port/x", "cannot be opened|expected postgresql"),
    ("postgresql://tests:s3cret@host/x?s3cret=1", r"expected postgresql://"),
)


@pytest.mark.parametrize(("url", "message"), WRONG)
def test_a_wrong_url_is_told_without_the_password(tmp_path, url, message, caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(TTSCacheError, match=message) as caught:
        opened(tmp_path, catalogue_url=url)
    assert "SPEAKER_CATALOGUE_URL" in str(caught.value)
    assert "\n" not in str(caught.value)
    told = [str(caught.value), repr(caught.value), caught.value.log_text, caplog.text]
    told.append(repr(settings_of(tmp_path, catalogue_url=url)))
    assert not any("s3cret" in text or "s3%cret" in text for text in told)


def test_a_database_that_is_not_there_is_named(tmp_path, postgres):
    with pytest.raises(StorageError, match='database "nowhere" does not exist'):
        opened(tmp_path, catalogue_url=postgres.url("nowhere"))


def test_a_database_of_another_encoding_is_refused(tmp_path, postgres):
    postgres.query(
        "CREATE DATABASE latin TEMPLATE template0 ENCODING LATIN1 LOCALE 'C'"
        " LOCALE_PROVIDER libc"
    )
    with pytest.raises(StorageError, match=r"encoding LATIN1.*ENCODING 'UTF8'"):
        opened(tmp_path, catalogue_url=postgres.url("latin"))


def test_a_missing_driver_is_named(tmp_path, monkeypatch, postgres):
    url = postgres.url_of(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm_tts_cache.catalogue.postgres")
    monkeypatch.delattr("vllm_tts_cache.catalogue.postgres")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"pip install 'vllm-tts-cache\[fleet\]'"):
        opened(tmp_path, catalogue_url=url)


def test_looking_at_an_empty_database_makes_nothing(tmp_path, postgres):
    url = postgres.make("empty")
    with pytest.raises(ConfigError, match="no server"):
        open_existing(settings_of(tmp_path, catalogue_url=url))
    tables = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
    assert postgres.query(tables, database="empty") == []


@pytest.mark.parametrize("url", ("mysql://a:s3cret@b/c", "s3cret", "sqlite:///x"))
def test_another_database_is_refused_by_the_settings_and_not_shown(url):
    with pytest.raises(ConfigError) as caught:
        load_settings({"SPEAKER_CATALOGUE_URL": url})
    assert "SPEAKER_CATALOGUE_URL=(not shown)" in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    (
        "postgresql://user:p/s3cret@host/db",
        "postgresql://user:12/s3cret@host:5432/db",
        "postgresql://user:p@s3cret@host/db",
        "postgresql://host/?dbname=postgresql://u:s3cret@h/x",
        "postgresql://host/?dbname=password=s3cret",
    ),
)
def test_a_password_that_is_not_quoted_is_refused_and_not_shown(tmp_path, url):
    with pytest.raises(ConfigError, match="%40") as caught:
        opened(tmp_path, catalogue_url=url)
    assert "s3cret" not in str(caught.value)


def test_errors_of_the_database_do_not_show_names(store):
    with pytest.raises(StorageError) as caught, store.database.write() as db:
        db.execute(schema.speaker.insert().values(name="Annegret"))
    assert "Annegret" not in caught.value.log_text
    assert register(store, "Bob", 1).record.generation > 0


def test_who_is_frozen_as_it_deletes_removes_no_later_one(store, tmp_path, monkeypatch):
    """The same clip is registered while the process that removes it is frozen."""
    monkeypatch.setattr(backend, "IDLE_SECONDS", IDLE_SECONDS)
    remove = stored_files.remove

    def delete(mine, freeze):
        def frozen(*args):
            gone = remove(*args)
            freeze()
            return gone

        deletion = mine.registrations.delete("Ann")
        monkeypatch.setattr(stored_files, "remove", frozen)
        mine.remove_files(deletion)

    with frozen_child(tmp_path, delete):
        register(store, "Bob", 0)
    record = store.records(Page(limit=1))[0]
    assert (record.name, record.audio_sha256) == ("Bob", clip(0).audio.audio_sha256)
    assert store.read_audio(record.audio_sha256) is not None


def test_the_end_of_a_voice_is_by_the_clock_of_the_server(empty, tmp_path, monkeypatch):
    now = time.time
    register(empty, "Ann", expires_at=now() + 1800)
    for wrong in (3600, -3600):
        monkeypatch.setattr(time, "time", lambda off=wrong: now() + off)
        store = opened(tmp_path)
        assert not store.has_expired()
        assert store.expired_names() == store.registrations.delete_expired(9) == []
        assert store.find("Ann") is not None
        register(store, "Bea", expires_at=now() + 1800)
        assert store.names(Page(limit=9, sort="oldest")) == ["Ann", "Bea"]
        with pytest.raises(InvalidSpeakerError, match="past"):
            register(store, "Cid", expires_at=now() - 1800)
        store.close()
    monkeypatch.setattr(time, "time", now)


def test_a_clock_that_is_set_is_heard_of_with_the_lease(empty, monkeypatch):
    empty.participants.join()
    now = time.time
    register(empty, "Ann", expires_at=now() + 1800)
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    assert empty.find("Ann") is None  # it has not looked yet
    empty.participants.standing()
    assert empty.find("Ann") is not None
    monkeypatch.undo()
