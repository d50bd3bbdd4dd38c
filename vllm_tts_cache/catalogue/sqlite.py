"""One SQLite file, safe for threads, processes and forks."""

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

from filelock import FileLock

from vllm_tts_cache.errors import StorageError, StorageFullError
from vllm_tts_cache.files import storage_errors

BUSY_SECONDS = 10.0
OPEN_SECONDS = 60.0
_BUSY_TIMEOUT = f"PRAGMA busy_timeout = {1000 * BUSY_SECONDS:.0f}"

# Appended to, never edited: a registry that exists ran the earlier ones.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        # AUTOINCREMENT never hands out a generation twice, deleted rows included.
        # The embedding is last, so reading the other columns stays on one page.
        """
        CREATE TABLE speaker (
            generation INTEGER PRIMARY KEY AUTOINCREMENT,
            tenant TEXT NOT NULL,
            name_key TEXT NOT NULL,
            name TEXT NOT NULL,
            audio_sha256 TEXT,
            num_samples INTEGER NOT NULL,
            sample_rate_hz INTEGER NOT NULL,
            ref_text TEXT,
            consent TEXT NOT NULL,
            description TEXT,
            mime_type TEXT,
            original_filename TEXT,
            file_size INTEGER,
            created_at REAL NOT NULL,
            embedding BLOB,
            UNIQUE (tenant, name_key),
            CHECK ((audio_sha256 IS NULL) <> (embedding IS NULL))
        ) STRICT
        """,
        """
        CREATE INDEX speaker_audio ON speaker (audio_sha256)
            WHERE audio_sha256 IS NOT NULL
        """,
        # Files of stock vLLM-Omni that were looked at; see stock_import.py.
        """
        CREATE TABLE imported_file (
            file_name TEXT PRIMARY KEY,
            mtime_ns INTEGER NOT NULL,
            size INTEGER NOT NULL,
            name_key TEXT,
            created_at REAL,
            deleted_at REAL
        ) STRICT
        """,
        "CREATE INDEX imported_file_name ON imported_file (name_key)",
    ),
)


class Database:
    """The registry's file: opened, migrated, and a pool of connections to it.

    A pool rather than a connection per thread: a thread that ends would leave its
    connection open until the garbage collector finds it.

    Raises:
        StorageError: The file cannot be opened, is no database, or was written by
            a newer version of this package.
    """

    def __init__(self, path: Path):
        self.path = path
        # By process: what a child inherits it must neither use nor close.
        self._idle: dict[int, list[sqlite3.Connection]] = {}
        self._closed = False
        with storage_errors(path), sqlite_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # SQLite answers BUSY at once, whatever the timeout, when processes
            # switch a new file to WAL together; so they take turns.
            with FileLock(f"{path}.lock", timeout=OPEN_SECONDS):
                self._give_back(_open(path))
        _databases.add(self)

    @contextmanager
    def read(self) -> Generator[sqlite3.Connection, None, None]:
        """A connection; every statement sees one state of the registry.

        Raises:
            StorageError: SQLite failed inside the block.
        """
        with self._lent(BUSY_SECONDS) as db:
            yield db

    @contextmanager
    def read_at_once(self) -> Generator[sqlite3.Connection, None, None]:
        """As `read`, but a registry that is locked is an error and no wait.

        Raises:
            StorageError: SQLite failed inside the block, or another process has
                the file for itself.
        """
        with self._lent(busy_seconds=0.0) as db:
            db.execute("PRAGMA busy_timeout = 0")
            try:
                yield db
            finally:
                db.execute(_BUSY_TIMEOUT)

    @contextmanager
    def write(self) -> Generator[sqlite3.Connection, None, None]:
        """A connection in a write transaction, committed if the block ends well.

        Raises:
            StorageFullError: There is no space left; nothing was changed.
            StorageError: SQLite failed otherwise; nothing was changed.
        """
        with self.read() as db, _transaction(db):
            yield db

    def close(self) -> None:
        """Close every connection; those in use, when their block ends."""
        self._closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close what nobody uses; the next use opens a new connection."""
        idle = self._idle_here()
        while idle:
            idle.pop().close()

    @contextmanager
    def _lent(self, busy_seconds: float) -> Generator[sqlite3.Connection, None, None]:
        with sqlite_errors(self.path):
            db = self._take(busy_seconds)
            healthy = True
            try:
                yield db
            except sqlite3.Error:
                healthy = False
                raise
            finally:
                self._give_back(db) if healthy else db.close()

    def _take(self, busy_seconds: float) -> sqlite3.Connection:
        if self._closed:
            raise StorageError(f"The voice registry {self.path} is closed.")
        try:
            return self._idle_here().pop()
        except IndexError:
            return _connect(self.path, busy_seconds)

    def _give_back(self, db: sqlite3.Connection) -> None:
        self._idle_here().append(db)
        # Looked at after the append, so that close() cannot miss it.
        if self._closed:
            self.close_idle()

    def _idle_here(self) -> list[sqlite3.Connection]:
        return self._idle.setdefault(os.getpid(), [])


# SQLite keeps its idea of which file locks this process holds in memory. A fork
# copies the idea but not the locks, and a connection that the child opens later
# would believe it; so nothing idle is open at a fork.
_databases: "WeakSet[Database]" = WeakSet()


def _close_before_fork() -> None:
    for database in list(_databases):
        database.close_idle()


os.register_at_fork(before=_close_before_fork)


@contextmanager
def sqlite_errors(path: Path) -> Generator[None, None, None]:
    """Turn an SQLite error inside the block into the storage error it means."""
    try:
        yield
    except sqlite3.Error as exc:
        reason = str(exc)
        if "disk is full" in reason:
            raise StorageFullError(str(path)) from exc
        advice = ""
        if "not a database" in reason or "malformed" in reason:
            advice = (
                ". Restore the file from a backup, or move it away to start with an"
                " empty registry; audio and encodings are kept elsewhere"
            )
        raise StorageError(
            f"The voice registry {path} failed: {reason}{advice}."
        ) from exc


def _open(path: Path) -> sqlite3.Connection:
    """Connect and bring the schema up to date; the caller holds the file lock."""
    db = _connect(path)
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise StorageError(
                f"The voice registry {path} was written by a newer vllm-tts-cache "
                f"(schema {version}; this one knows {len(MIGRATIONS)}). Upgrade "
                "vllm-tts-cache, or set SPEAKER_SAMPLES_DIR to another directory."
            )
        db.execute("PRAGMA journal_mode = WAL")
        _migrate(db, version)
    except BaseException:
        db.close()
        raise
    return db


def _connect(path: Path, busy_seconds: float = BUSY_SECONDS) -> sqlite3.Connection:
    db = sqlite3.connect(
        path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
    )
    try:
        # NORMAL could lose a committed speaker when the power fails.
        db.execute("PRAGMA synchronous = FULL")
    except BaseException:
        db.close()
        raise
    return db


def _migrate(db: sqlite3.Connection, version: int) -> None:
    if version == len(MIGRATIONS):
        return
    with _transaction(db):
        for migration in MIGRATIONS[version:]:
            for statement in migration:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS):d}")


@contextmanager
def _transaction(db: sqlite3.Connection) -> Generator[None, None, None]:
    # IMMEDIATE: what is read before writing must still hold when it is written.
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    finally:
        # SQLite itself has rolled back after some errors, not after others.
        if db.in_transaction:
            db.execute("ROLLBACK")
