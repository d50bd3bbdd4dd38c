"""Which of SQLite's errors are a full disk, a busy file and a damaged one."""

import sqlite3
from typing import Any

import pytest

from vllm_tts_cache.catalogue.sqlite import Code, code_of, code_of_text, errors
from vllm_tts_cache.errors import StorageBusyError, StorageError, StorageFullError

pytestmark = pytest.mark.sqlite

_CONSTRAINT = 19  # which means nothing to us


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file.sqlite3"
    with connected(path) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE voice (name TEXT PRIMARY KEY)")
        db.executemany("INSERT INTO voice VALUES (?)", [("x" * n,) for n in range(500)])
    db.close()
    return path


def connected(path):
    return sqlite3.connect(path, timeout=0, isolation_level=None)


def fill(path):
    db = connected(path)
    db.execute("PRAGMA max_page_count = 1")
    db.execute("INSERT INTO voice VALUES (?)", ["y" * 900_000])


def write_beside_a_writer(path):
    writer = connected(path)
    writer.execute("BEGIN IMMEDIATE")
    connected(path).execute("BEGIN IMMEDIATE")


def write_after_what_was_read_has_changed(path):
    reader = connected(path)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM voice").fetchall()
    connected(path).execute("DELETE FROM voice WHERE name = 'x'")
    reader.execute("DELETE FROM voice")


def read_damaged_pages(path):
    data = path.read_bytes()
    path.write_bytes(data[:8192] + b"\xff" * (len(data) - 8192))
    connected(path).execute("SELECT sum(length(name)) FROM voice").fetchall()


def read_no_database(path):
    path.write_bytes(b"RIFF" * 4096)
    connected(path).execute("SELECT * FROM voice")


FAULTS = {
    fill: (Code.FULL, StorageFullError),
    write_beside_a_writer: (Code.BUSY, StorageBusyError),
    write_after_what_was_read_has_changed: (Code.BUSY, StorageBusyError),
    read_damaged_pages: (Code.CORRUPT, StorageError),
    read_no_database: (Code.NOTADB, StorageError),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_told_by_its_code_and_on_python_3_10_by_its_text(path, fault):
    code, kind = FAULTS[fault]
    with pytest.raises(kind) as caught, errors(path):
        fault(path)
    assert type(caught.value) is kind
    error = caught.value.__cause__
    assert code_of(error) is code_of_text(str(error)) is code
    assert ("Restore the file from a backup" in str(caught.value)) is (
        kind is StorageError
    )


def test_what_is_none_of_them_is_a_plain_storage_error(path):
    closed = connected(path)
    closed.close()
    for db, statement in (
        (connected(path), "INSERT INTO voice VALUES ('x')"),
        (connected(path), "SELECT * FROM nobody"),
        (closed, "SELECT 1"),
    ):
        with pytest.raises(sqlite3.Error) as caught:
            db.execute(statement)
        assert code_of(caught.value) is code_of_text(str(caught.value)) is None


@pytest.mark.skipif(
    not hasattr(sqlite3, "SQLITE_FULL"), reason="Python 3.10 names no codes"
)
@pytest.mark.parametrize("code", Code, ids=lambda code: code.name)
def test_the_text_is_not_asked_where_there_is_a_code(code):
    assert code == getattr(sqlite3, f"SQLITE_{code.name}")
    error: Any = sqlite3.OperationalError("in other words")
    error.sqlite_errorcode = code.value | 3 << 8
    assert code_of(error) is code
    told_otherwise: Any = sqlite3.OperationalError("a name that is malformed")
    told_otherwise.sqlite_errorcode = _CONSTRAINT
    assert code_of(told_otherwise) is None
