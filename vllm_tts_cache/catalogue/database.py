"""The catalogue's database: creates or opens it, and lends its connections.

No connection crosses a fork. SQLite keeps a list of this process's file locks in
memory: a fork copies the list but not the locks, and a connection that the child opens
later would trust it. A connection to a server would be used by two processes. So idle
connections are closed before a fork, and the child leaves those in use to the parent.
"""

import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakSet

from sqlalchemy import Connection, Engine, Select, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import PoolProxiedConnection, QueuePool

from vllm_tts_cache import errors
from vllm_tts_cache.catalogue import schema, voice_news, voice_timbre, voice_usage
from vllm_tts_cache.files import give_up_ballast

T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S")

# `schema.create` makes these as well; their modules define them.
TABLES_OF_FEATURES = (
    voice_usage.voice_usage,
    voice_timbre.voice_timbre,
    voice_news.voice_news,
)

_engines: "WeakSet[Engine]" = WeakSet()
_databases: "WeakSet[Database]" = WeakSet()
_abandoned: list[PoolProxiedConnection] = []

Meaning = tuple[errors.StorageError, Exception | None]


class Backend(ABC):
    """Connections to one database, and the meaning of their errors.

    Attributes:
        has_leases: Whether several machines may reach it, so that leases, and not file
            locks, show which participants are alive.
        where: The database's name in messages and logs; never with a password.
        reading: Autocommit: each statement sees all that is committed by then.
        writing: Transactions, one at a time in all processes: what one has read still
            holds when it writes. They also move files, so a failed one cannot be run
            again: each waits for its turn instead.
        writing_long: As ``writing``, for one that may take minutes while others wait.
        snapshots: Transactions whose statements all see the state of one moment.
        renewing: As ``reading``, on a connection that only renewals of leases use.
        quick: As ``reading``, with a short timeout and autocommit in the driver.
    """

    has_leases: bool
    where: str
    reading: Engine
    writing: Engine
    writing_long: Engine
    snapshots: Engine
    renewing: Engine
    quick: Engine

    @abstractmethod
    def opening(self) -> AbstractContextManager[None]:
        """Make or check what a first use needs; SQLite also holds its lock inside."""

    @abstractmethod
    def meant_by(self, error: Exception) -> Meaning | None:
        """Translate an error; also return the error that may be shown as its cause.

        None if it is not an error of the database, its driver or its file.
        """

    def has_lost(self, error: Exception) -> bool:  # noqa: ARG002
        """Whether a connection was lost, so that a read may be repeated on another."""
        return False

    def wipe_log(self) -> bool:
        """Remove deleted rows from the database's log, if that is up to its clients.

        False if it failed, as while a reader needs the log: call it again later.
        """
        return True

    def close(self) -> None:
        """Close every connection; those in use, when their block ends."""
        writers = self.writing, self.writing_long
        readers = self.reading, self.snapshots, self.renewing, self.quick
        for engine in (*writers, *readers):
            engine.dispose()


def beginning(engine: Engine, *statements: str) -> Engine:
    """Return an engine on the same pool whose transactions begin with statements.

    `Database` executes them. A listener would slow each statement down.
    """
    return engine.execution_options(begins_with=statements)


def with_ballast(act: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Have a method that frees space, or starts a server, use the ballast.

    While a full disk fails it, half of the ballast is given up and the method is called
    again. Its object is a `Database`, or has one as ``database``.
    """

    @wraps(act)
    def retried(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            try:
                return act(self, *args, **kwargs)
            except errors.StorageFullError:
                database = vars(self).get("database", self)
                if not give_up_ballast(database.directory):
                    raise

    return retried


class Database:
    """Connections to one catalogue, for any thread; safe beside other processes.

    ``read``, ``snapshot``, ``renewing``, ``write`` and ``write_long`` lend a connection
    of the engine in `Backend` that is named so. What ``read`` writes is committed by
    each statement, without a turn: rows on which nothing else depends. The block of
    ``write`` or ``write_long`` is one transaction, committed if the block succeeds;
    after an error nothing was changed. They all raise

    * StorageBusyError: Another process writes, for longer than we wait.
    * StorageUnavailableError: The server does not answer, or was lost.
    * StorageError: Another failure; StorageFullError where no space is left.

    Args:
        directory: The one whose ballast may be given up.

    Attributes:
        kept: Idle connections to a file, of `first_at_once`.
        num_cut_off: Write transactions that were cut off, so that it is unknown whether
            they were committed: files that one placed may have stayed.
    """

    def __init__(self, backend: Backend, directory: Path):
        self.backend, self.directory = backend, directory
        self.where = backend.where
        self.read = partial(self._lent, backend.reading)
        self.snapshot = partial(self._lent, backend.snapshots)
        self.renewing = partial(self._lent, backend.renewing)
        self.write = partial(self._lent, backend.writing, writes=True)
        self.write_long = partial(self._lent, backend.writing_long, writes=True)
        self.num_cut_off = 0
        self._ahead_seconds = 0.0
        self._compiled: dict[Select[Any], Any] = {}
        self.kept: list[PoolProxiedConnection] = []
        self._is_closed = False
        _databases.add(self)

    def now(self) -> float:
        """Return Unix seconds by the database's clock, without a query.

        The clocks of machines differ, by hours if they are not synchronised. Code that
        reads the database's clock anyway calls `set_now`; before that, and with SQLite,
        this is the machine's clock.
        """
        return time.time() + self._ahead_seconds

    def set_now(self, now: float) -> None:
        """Set the clock of `now` to the database's, in Unix seconds."""
        self._ahead_seconds = now - time.time()

    @with_ballast
    def prepare(self) -> None:
        """Create the tables unless they exist; processes that do so take turns.

        Raises: StorageError: The database cannot be opened, is none, or is of another
            version.
        """
        with self.backend.opening(), self.write_long() as db:
            if (version := schema.stored_version(db)) == 0:
                schema.create(db)
            else:
                self._check_version(version)
            self.set_now(schema.now(db))

    def check(self) -> None:
        """Check that the catalogue has this schema version; writes nothing.

        Raises:
            NoCatalogueError: The database is empty.
            StorageError: The catalogue is of another version.
        """
        with self.read() as db:
            version = schema.stored_version(db)
            self.set_now(schema.now(db))
        if version == 0:
            raise errors.NoCatalogueError(
                f"The voice catalogue {self.where} is empty: no server has stored "
                "voices there. Start the server once, or correct the settings."
            )
        self._check_version(version)

    def secret(self) -> bytes:
        """Return the key of salts and signatures; the first process to ask makes it.

        Where its row was deleted, as after a leak, the next one to ask makes another.

        Raises: StorageError.
        """
        query = select(schema.secret.c.key)
        with self.read() as db:
            key: bytes | None = db.execute(query).scalar()
        if key is not None:
            return key
        with self.write() as db:
            if (key := db.execute(query).scalar()) is None:
                key = secrets.token_bytes(32)
                db.execute(schema.secret.insert().values(number=1, key=key))
            return key

    def _check_version(self, version: int) -> None:
        if version != schema.VERSION:
            raise errors.StorageError(
                f"The voice catalogue {self.where} has schema {version}, and this "
                f"vllm-tts-cache reads schema {schema.VERSION} only: set "
                "SPEAKER_SAMPLES_DIR to an empty directory, and SPEAKER_CATALOGUE_URL "
                "and SPEAKER_STORE_URL, where they are set, to an empty database and "
                "bucket."
            )

    def first_at_once(
        self, statement: Select[Any], where: Mapping[str, Any]
    ) -> Sequence[Any] | None:
        """Return the first row of a statement, for a caller that must not wait.

        The driver runs it. SQLAlchemy would take half a millisecond while its code is
        in no cache of the processor, as in every request; the driver takes half of
        that. No column may need a conversion by SQLAlchemy.

        Raises:
            StorageBusyError: The statement would have to wait.
            StorageError: The database failed.
        """
        if self._is_closed:
            raise self._closed()
        if (known := self._compiled.get(statement)) is None:
            compiled = statement.compile(dialect=self.backend.quick.dialect)
            known = compiled.string, compiled.positiontup, compiled.params
            self._compiled[statement] = known
        text, names, constants = known
        given = {**constants, **where}
        arguments = given if names is None else [given[name] for name in names]
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
            # Closed meanwhile: `close` did not see a connection opened after it.
            if self._is_closed:
                self.close()

    def _first(self, text: str, arguments: Any) -> Sequence[Any] | None:
        # The pool takes as long to lend a connection to a file as the file to answer.
        try:
            lent = self.kept.pop()
        except IndexError:
            lent = self.backend.quick.raw_connection()
        try:
            cursor = lent.cursor()
            cursor.execute(text, arguments)
            rows = cursor.fetchall()  # none is left, so the statement is over
        except BaseException:
            lent.invalidate()  # after some errors a connection is of no use
            lent.close()
            raise
        if self.backend.has_leases:  # its pool renews connections
            lent.close()
        else:
            self.kept.append(lent)
        return rows[0] if rows else None

    def release(self) -> None:
        """Return the connections that are kept, as before a fork."""
        while self.kept:
            with suppress(IndexError):  # in use again
                self.kept.pop().close()

    def close(self) -> None:
        """Close every connection; those in use, when their block ends."""
        self._is_closed = True
        self.release()
        self.backend.close()

    def _closed(self) -> errors.StorageError:
        return errors.StorageError(f"The voice catalogue {self.where} is closed.")

    @contextmanager
    def _lent(
        self, engine: Engine, *, writes: bool = False
    ) -> Generator[Connection, None, None]:
        if self._is_closed:
            raise self._closed()
        try:
            with engine.connect() as db:
                try:
                    with db.begin() if writes else nullcontext():
                        for each in db.get_execution_options().get("begins_with", ()):
                            db.exec_driver_sql(each)
                        yield db
                except DBAPIError:
                    db.invalidate()  # after some errors a connection is of no use
                    raise
        except Exception as exc:
            if (meant := self.backend.meant_by(exc)) is None:
                raise
            if writes and isinstance(meant[0], errors.StorageUnavailableError):
                self.num_cut_off += meant[0].was_cut_off
            raise meant[0] from meant[1]
        finally:
            # Closed meanwhile: `close` did not see a connection opened after it.
            if self._is_closed:
                self.backend.close()


class EndingPool(QueuePool):
    """A pool whose connections are closed when it is disposed of.

    SQLAlchemy's own pool closes the idle ones, and keeps one that is in use at that
    moment when it is returned later: it would never be closed.
    """

    def dispose(self) -> None:
        """Close the idle connections now, and those in use when they are given back."""
        # One that finds the queue full is closed. It looks and is added under a lock:
        # so one that looked before this is found below.
        vars(self._pool)["_full"] = lambda: True
        super().dispose()


def guard(engine: Engine) -> Engine:
    """Let no connection of the engine cross a fork from now on; return the engine."""
    _engines.add(engine)
    return engine


def _close_before_fork() -> None:
    for database in list(_databases):
        database.release()
    for engine in list(_engines):
        engine.dispose()


def _abandon_in_child() -> None:
    # In use by another thread at the fork: the child must neither use nor close it.
    for database in list(_databases):
        _abandoned.extend(database.kept)
        database.kept.clear()
    for engine in list(_engines):
        engine.dispose(close=False)


os.register_at_fork(before=_close_before_fork, after_in_child=_abandon_in_child)
