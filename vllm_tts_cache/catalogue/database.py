"""The catalogue's database: made or opened, and lent to those who read and write.

No connection crosses a fork. SQLite keeps its idea of which file locks this process
holds in memory: a fork copies the idea but not the locks, and a connection that the
child opens later would believe it. A connection to a server would be used by two. So
nothing idle is open at a fork, and what is in use then is the parent's.
"""

import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol
from weakref import WeakSet

from sqlalchemy import Connection, Engine, Select, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.errors import (
    NoCatalogueError,
    StorageError,
    StorageUnavailableError,
)

_engines: "WeakSet[Engine]" = WeakSet()

Meaning = tuple[StorageError, Exception | None]


class Backend(Protocol):
    """Connections to one database, and what goes wrong with them.

    Attributes:
        where: What it is called before people; never with a password.
        reading: Each statement by itself, of what is committed.
        writing: Transactions of which one goes on at a time, in all processes: what
            one has read still holds when it writes. Files are moved in them too, so
            that none can be run again: it waits for its turn instead.
        writing_long: As ``writing``, for what takes long and others wait for.
        snapshots: Transactions that read the state of one moment.
        renewing: As ``reading``, on a connection that nothing else has: of leases.
        quick: As ``reading``, without transactions, for who must not wait long.
        has_leases: Whether several machines may reach it, so that no lock tells who is
            alive.
    """

    has_leases: bool
    where: str
    reading: Engine
    writing: Engine
    writing_long: Engine
    snapshots: Engine
    renewing: Engine
    quick: Engine

    def opening(self) -> AbstractContextManager[None]:
        """Hold the turn to make or open it, having made what a first use needs."""
        ...

    def meant_by(self, error: Exception) -> Meaning | None:
        """What an error means, and the error that may be shown as its cause.

        None if it is none of the database's.
        """
        ...

    def has_lost(self, error: Exception) -> bool:
        """Whether a connection was lost, so that what only reads may be asked again."""
        ...

    def wipe_log(self) -> bool:
        """Let nothing of deleted rows stay in a log, so far as that is in our hands.

        False if it is to be done again later: somebody reads the log.
        """
        ...

    def close(self) -> None:
        """Close every connection; those in use, when their block ends."""
        ...


def beginning(engine: Engine, *statements: str) -> Engine:
    """Its own engine on the same pool, whose transactions begin with statements.

    Its own, because a listener costs every connection of one.
    """
    own = engine.execution_options()

    def begin(db: Connection) -> None:
        for statement in statements:
            db.exec_driver_sql(statement)

    event.listen(own, "begin", begin)
    return own


class Database:
    """Connections to one catalogue, for any thread; safe beside other processes.

    Attributes:
        where: What it is called before people.
        num_cut_off: Write transactions of which nobody knows whether they were
            committed: what was placed in one may have stayed.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self.where = backend.where
        self.num_cut_off = 0
        self._ahead_seconds = 0.0
        self._compiled: dict[Select[Any], Any] = {}
        self._is_closed = False

    def now(self) -> float:
        """Unix seconds of the catalogue's database, told without asking it.

        The clocks of machines differ, by hours where nobody looks after them. Who asks
        the database anyway sets this one; until then, and in a directory of our own,
        it is this machine's.
        """
        return time.time() + self._ahead_seconds

    def set_now(self, now: float) -> None:
        """Note what time it is there."""
        self._ahead_seconds = now - time.time()

    def prepare(self) -> None:
        """Make it, unless it is there; processes that do it at once take turns.

        Raises:
            StorageError: It cannot be opened, is no database, or is of another
                version.
        """
        with self.backend.opening(), self.write_long() as db:
            if (version := schema.stored_version(db)) == 0:
                schema.create(db)
            else:
                self._check_version(version)
            self.set_now(schema.now(db))

    def check(self) -> None:
        """See that it is of this version; writes nothing.

        Raises:
            NoCatalogueError: It is empty.
            StorageError: It is of another version.
        """
        with self.read() as db:
            version = schema.stored_version(db)
            self.set_now(schema.now(db))
        if version == 0:
            raise NoCatalogueError(
                f"The voice catalogue {self.where} is empty: no server has stored "
                "voices there. Start the server once, or correct the settings."
            )
        self._check_version(version)

    def _check_version(self, version: int) -> None:
        if version != schema.VERSION:
            raise StorageError(
                f"The voice catalogue {self.where} has schema {version}, and this "
                f"vllm-tts-cache reads schema {schema.VERSION} only: set "
                "SPEAKER_SAMPLES_DIR to an empty directory, and SPEAKER_CATALOGUE_URL "
                "and SPEAKER_STORE_URL, where they are set, to an empty database and "
                "bucket."
            )

    def read(self) -> AbstractContextManager[Connection]:
        """A connection; every statement sees one state of the catalogue.

        What one writes, of rows on which nothing else depends, is committed by itself,
        without a turn.

        Raises: StorageError: The database failed inside the block.
        """
        return self._lent(self.backend.reading)

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
        if self._is_closed:
            raise self._closed()
        text, arguments = self._for_driver(statement, where)
        try:
            try:
                return self._first(text, arguments)
            except Exception as exc:
                if not self.backend.has_lost(exc):
                    raise
                return self._first(text, arguments)
        except Exception as exc:
            if (meant := self.backend.meant_by(exc)) is None:
                raise
            raise meant[0] from meant[1]
        finally:
            # Closed meanwhile: what was opened after that is not known to whoever did.
            if self._is_closed:
                self.backend.close()

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

    def snapshot(self) -> AbstractContextManager[Connection]:
        """As `read`, and all statements see the same state."""
        return self._lent(self.backend.snapshots)

    def renewing(self) -> AbstractContextManager[Connection]:
        """As `read`, for leases, which wait for the connections of nobody else."""
        return self._lent(self.backend.renewing)

    def write(self) -> AbstractContextManager[Connection]:
        """A connection in a write transaction, committed if the block ends well.

        Raises:
            StorageBusyError: Another process writes, for longer than we wait.
            StorageUnavailableError: The server does not answer, or was lost.
            StorageError: Nothing was changed; StorageFullError where no space is left.
        """
        return self._lent(self.backend.writing, writes=True)

    def write_long(self) -> AbstractContextManager[Connection]:
        """As `write`, for statements over all rows; who writes waits, or is refused."""
        return self._lent(self.backend.writing_long, writes=True)

    def close(self) -> None:
        """Close every connection; those in use, when their block ends."""
        self._is_closed = True
        self.backend.close()

    def _closed(self) -> StorageError:
        return StorageError(f"The voice catalogue {self.where} is closed.")

    @contextmanager
    def _lent(
        self, engine: Engine, *, writes: bool = False
    ) -> Generator[Connection, None, None]:
        if self._is_closed:
            raise self._closed()
        try:
            with engine.connect() as db:
                try:
                    if writes:
                        with db.begin():
                            yield db
                    else:
                        yield db
                except DBAPIError:
                    db.invalidate()  # after some errors a connection is of no use
                    raise
        except Exception as exc:
            if (meant := self.backend.meant_by(exc)) is None:
                raise
            if writes and isinstance(meant[0], StorageUnavailableError):
                self.num_cut_off += meant[0].was_cut_off
            raise meant[0] from meant[1]
        finally:
            # Closed meanwhile: what was opened after that is not known to whoever did.
            if self._is_closed:
                self.backend.close()


class EndingPool(QueuePool):
    """A pool whose connections are closed when it is disposed of.

    SQLAlchemy's own closes those that are idle, and keeps one that is in use at that
    moment when it is given back: nobody would close it then.
    """

    _is_over = False

    def dispose(self) -> None:
        """Close the idle connections now, and those in use when they are given back."""
        self._is_over = True
        super().dispose()

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        super()._do_return_conn(record)
        # Asked afterwards: either it is seen here, or whoever disposes finds it.
        if self._is_over:
            super().dispose()


def guard(engine: Engine) -> Engine:
    """Return the engine, of which no connection crosses a fork from now on."""
    _engines.add(engine)
    return engine


def _close_before_fork() -> None:
    for engine in list(_engines):
        engine.dispose()


def _abandon_in_child() -> None:
    # In use by another thread at the fork: the child must neither use nor close it.
    for engine in list(_engines):
        engine.dispose(close=False)


os.register_at_fork(before=_close_before_fork, after_in_child=_abandon_in_child)
