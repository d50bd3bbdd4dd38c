"""The catalogue's file: opened, migrated, and lent to those who read and write."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from sqlalchemy import Connection, Engine, Select
from sqlalchemy.exc import DBAPIError

from vllm_tts_cache.catalogue import dialect, schema
from vllm_tts_cache.errors import StorageBusyError, StorageError
from vllm_tts_cache.files import FILE_MODE

BUSY_SECONDS = 10.0
# On an event loop; a reader waits only while the file is opened or recovered.
AT_ONCE_SECONDS = 0.05
# Another process may be taking over or importing a large directory.
OPEN_SECONDS = 600.0


class Database:
    """Connections to one catalogue, for any thread; safe beside other processes.

    A pool rather than a connection per thread: a thread that ends would leave its
    connection open until the garbage collector finds it.
    """

    def __init__(self, path: Path, *, busy_seconds: float = BUSY_SECONDS):
        self.path = path
        self._engine = dialect.open_engine(path, busy_seconds=busy_seconds)
        self._quick = dialect.open_engine(path, busy_seconds=AT_ONCE_SECONDS)
        self._writer = dialect.writing(self._engine)
        self._snapshots = dialect.snapshots(self._engine)
        self._compiled: dict[Select[Any], Any] = {}
        self._is_closed = False

    def prepare(self) -> None:
        """Make and migrate the file; processes that do it at once take turns.

        Raises:
            StorageError: It cannot be opened, is no database, or is of a newer
                version of this package.
        """
        with dialect.catalogue_errors(self.path), opening_lock(self.path):
            dialect.prepare_file(self.path)
            dialect.use_wal(self._engine)
            with self.write() as db:
                schema.migrate(db)

    def check(self) -> None:
        """Raise StorageError unless the file is of this version; writes nothing."""
        with self.read() as db:
            version = schema.stored_version(db)
        if version != schema.VERSION:
            raise StorageError(
                f"The voice catalogue {self.path} has schema {version}, and this "
                f"vllm-tts-cache knows {schema.VERSION}. Start the server once, or "
                "use the version that wrote it."
            )

    @contextmanager
    def read(self) -> Generator[Connection, None, None]:
        """A connection; every statement sees one state of the catalogue.

        Raises:
            StorageError: The database failed inside the block.
        """
        with self._lent(self._engine) as db:
            yield db

    def first_at_once(
        self, statement: Select[Any], where: Mapping[str, Any]
    ) -> Sequence[Any] | None:
        """The first row that it finds, for a caller that must not wait.

        By the driver itself. SQLAlchemy takes half a millisecond for it where its code
        is in no cache of the processor, as in every request; the driver takes half.
        No column may need a conversion.

        Raises:
            StorageBusyError: It would have to wait.
            StorageError: The database failed.
        """
        self._check_open()
        text, arguments = self._for_driver(statement, where)
        with dialect.catalogue_errors(self.path):
            lent = self._quick.raw_connection()
            try:
                return lent.cursor().execute(text, arguments).fetchone()
            except BaseException:
                lent.invalidate()  # after some errors a connection is of no use
                raise
            finally:
                lent.close()

    def _for_driver(
        self, statement: Select[Any], where: Mapping[str, Any]
    ) -> tuple[str, Any]:
        if (known := self._compiled.get(statement)) is None:
            known = statement.compile(dialect=self._quick.dialect)
            self._compiled[statement] = known
        names = known.positiontup
        return known.string, where if names is None else [where[n] for n in names]

    @contextmanager
    def snapshot(self) -> Generator[Connection, None, None]:
        """As `read`, and all statements see the same state."""
        with self._lent(self._snapshots) as db:
            yield db

    @contextmanager
    def write(self) -> Generator[Connection, None, None]:
        """A connection in a write transaction, committed if the block ends well.

        Raises:
            StorageBusyError: Another process writes, for longer than we wait.
            StorageFullError: There is no space left; nothing was changed.
            StorageError: The database failed otherwise; nothing was changed.
        """
        with self._lent(self._writer) as db, db.begin():
            yield db

    def wipe_log(self) -> None:
        """Let nothing of deleted rows stay in the log.

        If somebody reads it all the time it is emptied another time: after the next
        deletion, or when the last process closes it.
        """
        with suppress(StorageError), dialect.catalogue_errors(self.path):
            dialect.wipe_log(self._quick)

    def close(self) -> None:
        """Close every connection; those in use, when their block ends."""
        self._is_closed = True
        self._engine.dispose()
        self._quick.dispose()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StorageError(f"The voice catalogue {self.path} is closed.")

    @contextmanager
    def _lent(self, engine: Engine) -> Generator[Connection, None, None]:
        self._check_open()
        with dialect.catalogue_errors(self.path), engine.connect() as db:
            try:
                yield db
            except DBAPIError:
                db.invalidate()  # after some errors a connection is of no use
                raise


@contextmanager
def opening_lock(
    path: Path, timeout_seconds: float = OPEN_SECONDS
) -> Generator[None, None, None]:
    """Hold the turn to open, migrate or take over; it ends with its process.

    Raises:
        StorageBusyError: Another process has it for longer than that.
    """
    try:
        with FileLock(
            f"{path}.lock", timeout_seconds, mode=FILE_MODE, is_singleton=False
        ):
            yield
    except Timeout as exc:
        raise StorageBusyError(2) from exc
