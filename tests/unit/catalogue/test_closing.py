"""A catalogue that is closed while others use it has no connection left."""

import sqlite3
import threading
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from tests.store_samples import opened
from vllm_tts_cache.catalogue import database
from vllm_tts_cache.errors import StorageError

pytestmark = pytest.mark.every_backend

NUM_ROUNDS = 10


def driver_connection(db):
    return db.connection.driver_connection


def is_closed(connection) -> bool:
    try:
        connection.execute("SELECT 1")
    except (sqlite3.ProgrammingError, psycopg.OperationalError) as error:
        assert "closed" in str(error)
        return True
    return False


def test_one_in_use_is_closed_when_its_block_ends(tmp_path):
    store = opened(tmp_path)
    with store.database.read() as db:
        used = driver_connection(db)
        store.close()
        assert not is_closed(used)
    assert is_closed(used)


def test_one_in_use_at_a_fork_is_closed_when_its_block_ends(store):
    with store.database.read() as db:
        used = driver_connection(db)
        database._close_before_fork()
    assert is_closed(used)
    with store.database.read() as db:
        assert not is_closed(driver_connection(db))


def test_none_is_kept_by_who_asks_while_it_is_closed(tmp_path):
    """With PostgreSQL the fixture looks at the server's own list, at the end."""
    for _ in range(NUM_ROUNDS):
        store = opened(tmp_path)
        readers = [threading.Thread(target=ask, args=(store,)) for _ in range(3)]
        for reader in readers:
            reader.start()
        store.close()
        for reader in readers:
            reader.join()
        backend: Any = store.database.backend
        for engine in (backend.quick, backend.reading, backend.renewing):
            assert engine.pool.checkedin() == engine.pool.checkedout() == 0


def ask(store) -> None:
    with suppress(StorageError):
        while True:
            store.find("Ann")
            with store.database.renewing():
                pass
