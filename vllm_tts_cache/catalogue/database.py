"""The catalogue's database: opened, migrated, and lent to those who read and write."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, Select
from sqlalchemy.exc import DBAPIError

from vllm_tts_cache.catalogue import dialect, migrations
from vllm_tts_cache.catalogue.backend import Backend
from vllm_tts_cache.errors import NoCatalogueError, StorageError


class CatalogueClock:
    """Unix seconds of the catalogue's database, told without asking it.

    The clocks of machines differ, by hours where nobody looks after them. Who asks the
    database anyway says what time it is there; until then, and in a directory of our
    own, it is this machine's.
    """

    def __init__(self) -> None:
        self._ahead_seconds = 0.0

    def now(self) -> float:
        """What time it is there."""
        return time.time() + self._ahead_seconds

    def set(self, now: float) -> None:
        """It is so late there."""
        self._ahead_seconds = now - time.time()


class Database:
    """Connections to one catalogue, for any thread; safe beside other processes.

    Attributes:
        clock: The catalogue's, set by who asks for news of it.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self.clock = CatalogueClock()
        self._compiled: dict[Select[Any], Any] = {}
        self._is_closed = False

    @property
    def where(self) -> str:
        """What it is called before people."""
        return self.backend.where

    def prepare(
        self, is_in_use: Callable[[Connection], bool] = lambda _: False
    ) -> None:
        """Make and migrate it; processes that do it at once take turns.

        Args:
            is_in_use: Whether a server is at work on it; asked before a migration.

        Raises:
            StorageError: It cannot be opened, is no database, or is of a newer
                version of this package.
        """
        with self.backend.opening(), self.write_long() as db:
            migrations.migrate(db, is_in_use)
            self.clock.set(dialect.now(db))

    def check(self) -> None:
        """See that it is of this version; writes nothing.

        Raises:
            NoCatalogueError: It is empty.
            StorageError: It is of another version.
        """
        with self.read() as db:
            version = migrations.stored_version(db)
            self.clock.set(dialect.now(db))
        if version == 0:
            raise NoCatalogueError(
                f"The voice catalogue {self.where} is empty: no server has stored "
                "voices there. Start the server once, or correct the settings."
            )
        if version != migrations.VERSION:
            raise StorageError(
                f"The voice catalogue {self.where} has schema {version}, and this "
                f"vllm-tts-cache knows {migrations.VERSION}. Start the server once, or "
                "use the version that wrote it."
            )

    @contextmanager
    def read(self) -> Generator[Connection, None, None]:
        """A connection; every statement sees one state of the catalogue.

        Raises:
            StorageError: The database failed inside the block.
        """
        with self._lent(self.backend.reading) as db:
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
        text, arguments = self._for_driver(statement, where)
        with self._open(), self.backend.errors():
            return self.backend.retried(lambda: self._first(text, arguments))

    def _first(self, text: str, arguments: Any) -> Sequence[Any] | None:
        lent = self.backend.quick.raw_connection()
        try:
            cursor = lent.cursor()
            cursor.execute(text, arguments)
            return cursor.fetchone()
        except BaseException:
            lent.invalidate()  # after some errors a connection is of no use
            raise
        finally:
            lent.close()

    def _for_driver(
        self, statement: Select[Any], where: Mapping[str, Any]
    ) -> tuple[str, Any]:
        if (known := self._compiled.get(statement)) is None:
            compiled = statement.compile(dialect=self.backend.quick.dialect)
            known = compiled.string, compiled.positiontup, compiled.params
            self._compiled[statement] = known
        text, names, constants = known
        given = {**constants, **where}
        return text, given if names is None else [given[name] for name in names]

    @contextmanager
    def snapshot(self) -> Generator[Connection, None, None]:
        """As `read`, and all statements see the same state."""
        with self._lent(self.backend.snapshots) as db:
            yield db

    @contextmanager
    def alone(self) -> Generator[Connection, None, None]:
        """A connection of which each statement is committed by itself, without a turn.

        For rows of which nothing else depends on what was read before.
        """
        with self._lent(self.backend.reading) as db:
            yield db

    @contextmanager
    def renewing(self) -> Generator[Connection, None, None]:
        """A connection of which each statement is committed by itself, without a turn.

        For leases, which wait neither for those who write nor for their connections.
        """
        with self._lent(self.backend.renewing) as db:
            yield db

    @contextmanager
    def write(self) -> Generator[Connection, None, None]:
        """A connection in a write transaction, committed if the block ends well.

        Raises:
            StorageBusyError: Another process writes, for longer than we wait.
            StorageUnavailableError: The server does not answer, or was lost.
            StorageFullError: There is no space left; nothing was changed.
            StorageError: The database failed otherwise; nothing was changed.
        """
        with self._lent(self.backend.writing) as db, db.begin():
            yield db

    @contextmanager
    def write_long(self) -> Generator[Connection, None, None]:
        """As `write`, for statements over all rows; who writes waits, or is refused."""
        with self._lent(self.backend.migrating) as db, db.begin():
            yield db

    def wipe_log(self) -> bool:
        """Let nothing of deleted rows stay in the log; False: do it again later."""
        return self.backend.wipe_log()

    def close(self) -> None:
        """Close every connection; those in use, when their block ends."""
        self._is_closed = True
        self.backend.close()

    @contextmanager
    def _open(self) -> Generator[None, None, None]:
        if self._is_closed:
            raise StorageError(f"The voice catalogue {self.where} is closed.")
        try:
            yield
        finally:
            # Closed meanwhile: what was opened after that is not known to whoever did.
            if self._is_closed:
                self.backend.close()

    @contextmanager
    def _lent(self, engine: Engine) -> Generator[Connection, None, None]:
        with self._open(), self.backend.errors(), engine.connect() as db:
            try:
                yield db
            except DBAPIError:
                db.invalidate()  # after some errors a connection is of no use
                raise
