"""What only SQLite needs: opening the file, its modes, its locks and its errors."""

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from vllm_tts_cache.catalogue import database
from vllm_tts_cache.catalogue.database import Backend, EndingPool, Meaning, beginning
from vllm_tts_cache.errors import StorageBusyError, StorageError, StorageFullError
from vllm_tts_cache.files import FILE_MODE, free_bytes, storage_error

FILE_NAME = "catalogue.sqlite3"

BUSY_SECONDS = 10.0  # that a writer waits for another one
# On an event loop; a reader waits only while the file is opened or recovered.
AT_ONCE_SECONDS = 0.05
# Another process may be importing a large directory.
OPEN_SECONDS = 600.0
_RETRY_AFTER_SECONDS = 2
_SHARED_MEMORY_BYTES = 32 << 10


class SqliteFile(Backend):
    """A catalogue in one file; see `Backend`.

    A pool rather than a connection per thread: a thread that ends would leave its
    connection open until the garbage collector finds it.
    """

    has_leases = False

    def __init__(self, path: Path):
        self.path = path
        self.where = str(path)
        self.reading = _open_engine(path, BUSY_SECONDS)
        self.renewing = self.reading  # not used, as there are no leases
        self.quick = _open_engine(path, AT_ONCE_SECONDS)
        # IMMEDIATE: what is read before writing must still hold when it is written.
        self.writing = beginning(self.reading, "BEGIN IMMEDIATE")
        self.writing_long = self.writing  # with the same timeout
        self.snapshots = beginning(self.reading, "BEGIN")

    @contextmanager
    def opening(self) -> Generator[None, None, None]:
        """Make the file, for its owner only, and hold `opening_lock` inside."""
        # SQLite answers BUSY at once, whatever the timeout, when processes switch a new
        # file to WAL together; so they take turns.
        try:
            with opening_lock(self.path):
                _prepare_file(self.path)
                with self.reading.connect() as db:
                    db.execute(text("PRAGMA journal_mode = WAL"))
                yield
        except Exception as exc:
            if (meant := self.meant_by(exc)) is None:
                raise
            raise meant[0] from meant[1]

    def meant_by(self, error: Exception) -> Meaning | None:
        """See `Backend`; SQLite's errors quote no rows and may be shown."""
        if isinstance(error, OSError):
            return storage_error(self.path, error), error
        if isinstance(error, DBAPIError):
            if error.connection_invalidated:  # closed under us by a fork's preparations
                return StorageBusyError(1), error
            return _storage_error(self.path, error.orig or error), error
        if isinstance(error, sqlite3.Error):
            if "closed database" in str(error):
                return StorageBusyError(1), error
            return _storage_error(self.path, error), error
        return None

    def wipe_log(self) -> bool:
        """Write the log into the file and empty it; False if it was not emptied.

        While a connection reads an earlier state, the log has to keep what was written
        since, and older versions of pages in it hold deleted rows.
        """
        try:
            with self.quick.connect() as db:
                answer = db.execute(text("PRAGMA wal_checkpoint(TRUNCATE)")).one()
        except Exception as exc:
            if self.meant_by(exc) is None:
                raise
            return False
        return answer[0] == 0  # else it is busy


@contextmanager
def opening_lock(path: Path) -> Generator[None, None, None]:
    """Hold the lock for making or opening the file; it ends with its process.

    Raises: StorageBusyError: Another process has held it for `OPEN_SECONDS`.
    """
    try:
        with FileLock(f"{path}.lock", OPEN_SECONDS, mode=FILE_MODE, is_singleton=False):
            yield
    except Timeout as exc:
        raise StorageBusyError(_RETRY_AFTER_SECONDS) from exc


def _storage_error(path: Path, error: BaseException) -> StorageError:
    # The code, because SQLite's manual promises no text; None if it is of the driver's
    # own. What follows its first byte is what led to it: BUSY_SNAPSHOT, CORRUPT_INDEX.
    extended = getattr(error, "sqlite_errorcode", None)
    code = None if extended is None else extended & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return StorageFullError()
    with suppress(OSError):
        # SQLite reports an I/O error if there is no space for the index of its log.
        is_io = code == sqlite3.SQLITE_IOERR
        if is_io and free_bytes(path.parent) < _SHARED_MEMORY_BYTES:
            return StorageFullError()
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
        return StorageBusyError(_RETRY_AFTER_SECONDS)
    advice = ""
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        advice = (
            ". Restore the file from a backup, or move it away to start with an empty"
            " catalogue; audio and encodings are kept elsewhere"
        )
    return StorageError(f"The voice catalogue {path} failed: {error}{advice}.")


def _open_engine(path: Path, busy_seconds: float) -> Engine:
    """Return an engine in autocommit whose connections wait so long for locks."""
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        creator=lambda: _connect(path, busy_seconds),
        poolclass=EndingPool,
        pool_size=4,
        max_overflow=-1,
        hide_parameters=True,  # names and texts of voices, which end up in tracebacks
    )
    return database.guard(engine)


def _prepare_file(path: Path) -> None:
    """Make the file if it is missing, for its owner only; -wal and -shm follow it.

    Raises: OSError.
    """
    with suppress(FileExistsError):
        # Never an existing file: closing it would give up the locks that SQLite has on
        # it for this process, and the next process that closes the catalogue would take
        # itself for the last, and remove the log under this one's connections.
        new = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(path, new, FILE_MODE))
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(FileNotFoundError):
            name.chmod(FILE_MODE)


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
