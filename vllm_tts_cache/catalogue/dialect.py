"""All that is SQLite's: opening the file, its modes, its locks and its errors."""

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    create_engine,
    event,
    func,
    literal_column,
    text,
)
from sqlalchemy.exc import DBAPIError

from vllm_tts_cache.errors import StorageBusyError, StorageError, StorageFullError
from vllm_tts_cache.files import FILE_MODE, storage_errors

_RETRY_AFTER_SECONDS = 2
_BUSY_CODES = ("database is locked", "database table is locked", "locking protocol")


def open_engine(path: Path, *, busy_seconds: float) -> Engine:
    """Connections to one file that wait for others so long, without transactions.

    See `writing` and `snapshots` for engines that begin some.
    """
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        creator=lambda: _connect(path, busy_seconds),
        pool_size=4,
        max_overflow=-1,
    )
    _engines.add(engine)
    return engine


def writing(engine: Engine) -> Engine:
    """The same connections, in transactions that write.

    IMMEDIATE: what is read before writing must still hold when it is written.
    """
    return _beginning(engine, "BEGIN IMMEDIATE")


def snapshots(engine: Engine) -> Engine:
    """The same connections; all that one reads is of one moment."""
    return _beginning(engine, "BEGIN")


def prepare_file(path: Path) -> None:
    """Make the file if it is missing, for its owner only; -wal and -shm follow it.

    Raises: OSError.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(FileNotFoundError):
            name.chmod(FILE_MODE)


def use_wal(engine: Engine) -> None:
    """Let readers go on while somebody writes; the caller holds the file lock.

    SQLite answers BUSY at once, whatever the timeout, when processes switch a new
    file to WAL together; so they take turns.
    """
    with engine.connect() as db:
        db.execute(text("PRAGMA journal_mode = WAL"))


def wipe_log(engine: Engine) -> None:
    """Write the log into the file and empty it, so far as nobody reads it now.

    What was deleted is still in the log until then.
    """
    with engine.connect() as db:
        db.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))


def problems(db: Connection) -> list[str]:
    """What is wrong with the file itself; reads it all."""
    lines = db.execute(text("PRAGMA integrity_check")).scalars()
    return [line for line in lines if line != "ok"]


def contains(column: "ColumnElement[str]", part: str) -> "ColumnElement[bool]":
    """Whether the text contains the part; nothing in it has a meaning of its own."""
    return func.instr(column, part) > 0


def joined(column: "ColumnElement[str]") -> "ColumnElement[str]":
    """The texts of all rows, with a space between."""
    # SQLAlchemy's own, aggregate_strings, renders its separator anew at each run.
    return func.group_concat(column, literal_column("' '"))


def raise_sequence(db: Connection, table: str, value: int) -> None:
    """Never hand out a number up to this one in the table."""
    where = {"table": table, "value": value}
    known = db.execute(
        text("SELECT seq FROM sqlite_sequence WHERE name = :table"), where
    ).scalar()
    if known is None:
        db.execute(text("INSERT INTO sqlite_sequence VALUES (:table, :value)"), where)
    elif known < value:
        db.execute(
            text("UPDATE sqlite_sequence SET seq = :value WHERE name = :table"), where
        )


@contextmanager
def catalogue_errors(path: Path) -> Generator[None, None, None]:
    """Turn an error of SQL inside the block into the storage error it means."""
    try:
        with storage_errors(path):
            yield
    except DBAPIError as exc:
        if exc.connection_invalidated:  # closed under us by a fork's preparations
            raise StorageBusyError(1) from exc
        raise _storage_error(path, exc.orig or exc) from exc
    except sqlite3.Error as exc:
        if "closed database" in str(exc):
            raise StorageBusyError(1) from exc
        raise _storage_error(path, exc) from exc


def _storage_error(path: Path, error: BaseException) -> StorageError:
    reason = str(error)
    if "disk is full" in reason:
        return StorageFullError(str(path))
    if any(code in reason for code in _BUSY_CODES):
        return StorageBusyError(_RETRY_AFTER_SECONDS)
    advice = ""
    if "not a database" in reason or "malformed" in reason:
        advice = (
            ". Restore the file from a backup, or move it away to start with an empty"
            " catalogue; audio and encodings are kept elsewhere"
        )
    return StorageError(f"The voice catalogue {path} failed: {reason}{advice}.")


def _connect(path: Path, busy_seconds: float) -> sqlite3.Connection:
    # An isolation level would make the driver begin transactions of its own.
    db = sqlite3.connect(
        path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
    )
    try:
        # NORMAL could lose a committed speaker when the power fails.
        db.execute("PRAGMA synchronous = FULL")
        # Else the pages would keep what a deleted voice's rows said.
        db.execute("PRAGMA secure_delete = ON")
    except BaseException:
        db.close()
        raise
    return db


def _beginning(engine: Engine, statement: str) -> Engine:
    """Its own engine on the same pool: a listener costs every connection of one."""
    own = engine.execution_options()

    def begin(db: Connection) -> None:
        db.exec_driver_sql(statement)

    event.listen(own, "begin", begin)
    return own


# SQLite keeps its idea of which file locks this process holds in memory. A fork
# copies the idea but not the locks, and a connection that the child opens later
# would believe it; so nothing idle is open at a fork.
_engines: "WeakSet[Engine]" = WeakSet()


def _close_before_fork() -> None:
    for engine in list(_engines):
        engine.dispose()


def _forget_in_child() -> None:
    # In use by another thread at the fork: the child must neither use nor close it.
    for engine in list(_engines):
        engine.dispose(close=False)


os.register_at_fork(before=_close_before_fork, after_in_child=_forget_in_child)
