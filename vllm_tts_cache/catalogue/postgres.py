"""What only PostgreSQL needs: connections, timeouts, transactions and errors."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Engine, create_engine, exc, text

from vllm_tts_cache.catalogue import database
from vllm_tts_cache.catalogue.database import Backend, EndingPool, Meaning, beginning
from vllm_tts_cache.errors import ConfigError, StorageError, StorageUnavailableError

T = TypeVar("T")

CONNECT_SECONDS = 3
# A statement of ours reads an index, or in maintenance a table of a million voices.
STATEMENT_SECONDS = 10
# A request with a voice waits for such a statement.
QUICK_SECONDS = 3
# Making the tables, and reading all rows to verify them.
LONG_SECONDS = 600
WRITE_TURN_SECONDS = 10
# A process that holds the turn and is silent for so long is frozen, and loses the turn.
IDLE_SECONDS = 30
# The server enforces the times above; for a frozen one, clients wait so much longer.
_GRACE_SECONDS = 2
# For so long after a failed attempt to connect, others get its error at once.
_DOWN_SECONDS = 1.0
_RECYCLE_SECONDS = 1800
_NUM_CONNECTIONS = 4

# One writer at a time in all processes of a catalogue, as in SQLite. A schema is a
# catalogue: several may share a database.
_TAKE_TURN = (
    "SELECT pg_advisory_xact_lock("
    "hashtextextended('vllm-tts-cache ' || current_schema(), 0))"
)
_WAIT_LONG = f"SET LOCAL lock_timeout = '{LONG_SECONDS}s'"
_SHOWN = ("user", "host", "port", "dbname")

# SQLSTATEs, or their classes, after which a later attempt may succeed, and why.
_UNAVAILABLE = {
    "08": "the connection was lost",
    "25006": "it is read-only, as a standby is",
    "25P03": "a transaction was idle for too long, and was ended",
    "40": "the transaction conflicted with another one",
    "53": "it has no room or no connection left",
    "55P03": "another server has been writing for too long",
    "57014": "it took too long",
    "57": "it was shut down, or is starting",
}


class _PatientConnection(psycopg.Connection[Any]):
    """Waits ``patience_seconds`` for an answer: frozen servers keep sockets open."""

    patience_seconds = float(LONG_SECONDS + _GRACE_SECONDS)

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """Wait for an answer, ``patience_seconds`` at most.

        Raises: OperationalError: None came; the connection is closed.
        """
        until = time.monotonic() + self.patience_seconds
        return super().wait(_watched(gen, until, self), *args, **kwargs)


def _watched(gen: PQGen[T], until: float, connection: _PatientConnection) -> PQGen[T]:
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > until:
                connection.pgconn.finish()
                raise _NoAnswerError("it does not answer")
            wanted = gen.send(ready)
    except StopIteration as end:
        return end.value


class _NoAnswerError(psycopg.OperationalError):
    pass


class PostgresServer(Backend):
    """A catalogue in a database of a PostgreSQL server.

    There is no log to wipe: the server itself overwrites deleted rows (VACUUM).

    Args:
        url: As libpq takes it: ``postgresql://user:password@host/database``.

    Raises: ConfigError: ``url`` is no such URL.
    """

    has_leases = True

    def __init__(self, url: str):
        self._url = url
        self.where = shown(url)
        self._down = threading.Lock()
        self._down_until, self._why_down = 0.0, ""
        # Writers that wait for the turn hold connections, so readers need others, and
        # the lease one that readers cannot take either.
        writers, readers = (self._open(STATEMENT_SECONDS) for _ in range(2))
        keeper, patient = self._open(QUICK_SECONDS, num=1), self._open(LONG_SECONDS)
        # Not pinged before each use, which would be a second round trip: a read on a
        # lost connection is repeated.
        self.quick = self._open(QUICK_SECONDS, autocommit=True)
        at_once = {"isolation_level": "AUTOCOMMIT"}
        self.reading: Engine = readers.execution_options(**at_once)
        self.renewing: Engine = keeper.execution_options(**at_once)
        # Whatever the server's default is: each statement has to see what was committed
        # before the turn came.
        committed = {"isolation_level": "READ COMMITTED"}
        self.writing = beginning(writers.execution_options(**committed), _TAKE_TURN)
        longer = patient.execution_options(**committed)
        self.writing_long = beginning(longer, _WAIT_LONG, _TAKE_TURN)
        repeatable = {"isolation_level": "REPEATABLE READ"}
        self.snapshots: Engine = patient.execution_options(**repeatable)

    @contextmanager
    def opening(self) -> Generator[None, None, None]:
        """Check that the server is usable; the write transaction inside takes the turn.

        Raises: StorageError: The server is out of reach, or its encoding is not UTF8.
        """
        try:
            with self.reading.connect() as db:
                encoding = db.execute(text("SHOW server_encoding")).scalar_one()
        except Exception as error:
            if (meant := self.meant_by(error)) is None:
                raise
            if not isinstance(meant[0], StorageUnavailableError):
                raise meant[0] from meant[1]
            raise StorageError(
                f"The voice catalogue {self.where} cannot be opened: "
                f"{meant[0].detail}. Start PostgreSQL there, or correct "
                "SPEAKER_CATALOGUE_URL."
            ) from None
        if encoding != "UTF8":
            raise StorageError(
                f"The voice catalogue {self.where} has the encoding {encoding}. Make "
                "the database with ENCODING 'UTF8' TEMPLATE template0."
            )
        yield

    def meant_by(self, error: Exception) -> Meaning | None:
        """See `Backend`; no cause may be shown, as the server's errors quote rows."""
        if isinstance(error, exc.TimeoutError):
            reason = "all connections to it are in use"
            return StorageUnavailableError(self.where, reason, was_cut_off=False), None
        if isinstance(error, exc.DBAPIError):
            return self._storage_error(error.orig or error), None
        if isinstance(error, psycopg.Error):
            return self._storage_error(error), None
        return None

    def has_lost(self, error: Exception) -> bool:
        """Whether a connection was lost, so that a read may be repeated on another."""
        if not isinstance(error, psycopg.OperationalError):
            return False
        # A read that has waited for its timeout does not wait again.
        if isinstance(error, _NoAnswerError) or error.sqlstate == "57014":
            return False
        # The others in the pool were lost with it.
        self.quick.dispose()
        return True

    def _open(
        self,
        statement_seconds: int,
        *,
        num: int = _NUM_CONNECTIONS,
        autocommit: bool = False,
    ) -> Engine:
        engine = create_engine(
            "postgresql+psycopg://",
            creator=partial(self._connect, statement_seconds, autocommit),
            poolclass=EndingPool,
            pool_size=num,
            max_overflow=num,
            pool_timeout=QUICK_SECONDS if autocommit else STATEMENT_SECONDS,
            pool_pre_ping=not autocommit,
            pool_recycle=_RECYCLE_SECONDS,
            hide_parameters=True,  # names and texts of voices, as in SQLite
            use_native_hstore=False,  # else each connection asks for the type
        )
        return database.guard(engine)

    def _connect(
        self, statement_seconds: int, autocommit: bool
    ) -> psycopg.Connection[Any]:
        with self._down:
            if time.monotonic() < self._down_until:
                raise psycopg.OperationalError(self._why_down)
        try:
            options = _options(self._url, statement_seconds)
            connection = _PatientConnection.connect(
                self._url, autocommit=autocommit, **options
            )
            connection.patience_seconds = float(statement_seconds + _GRACE_SECONDS)
            return connection
        except psycopg.OperationalError as error:
            with self._down:
                self._down_until = time.monotonic() + _DOWN_SECONDS
                self._why_down = str(error)
            raise

    def _storage_error(self, error: BaseException) -> StorageError:
        if not isinstance(error, psycopg.Error):
            what = type(error).__name__
            return StorageError(f"The voice catalogue {self.where} failed: {what}.")
        state = error.sqlstate or ""
        reason = _UNAVAILABLE.get(state) or _UNAVAILABLE.get(state[:2])
        if reason is not None:
            is_end = state[:2] in ("08", "57") and state != "57014"
            was_cut_off = is_end or state == "25P03"
            return StorageUnavailableError(self.where, reason, was_cut_off=was_cut_off)
        # libpq's own: it could not connect, or lost the connection.
        is_libpqs = not state and isinstance(error, psycopg.OperationalError)
        # Or it refuses the user, or has no such database.
        if is_libpqs or state[:2] in ("28", "3D"):
            return StorageUnavailableError(self.where, _one_line(error))
        # The first line alone: the others quote rows, which are of voices.
        what = _one_line(error.diag.message_primary or type(error).__name__)
        return StorageError(f"The voice catalogue {self.where} failed: {what}.")


def shown(url: str) -> str:
    """Return the URL for logs and messages, without its password.

    Raises: ConfigError: ``url`` is no URL; it, and libpq's error, are not quoted.
    """
    try:
        parts = conninfo_to_dict(url)
    except psycopg.Error:
        raise _no_url() from None
    user, host, port, name = (str(parts.get(part) or "") for part in _SHOWN)
    # libpq takes parts of a password that was not escaped for these, without an error.
    is_mistaken = set(port) - set("0123456789,") or set("@/=") & set(name)
    if is_mistaken or "@" in host[1:]:
        raise _no_url()
    place = f"{user}@" if user else ""
    place += host + (f":{port}" if port else "")
    return f"postgresql://{place}/{name}"


def _no_url() -> ConfigError:
    return ConfigError(
        "SPEAKER_CATALOGUE_URL=(not shown): expected "
        "postgresql://user:password@host:5432/database, special characters of a "
        "password written as %40 (for @), %2F (for /) and so on"
    )


def _options(url: str, statement_seconds: int) -> dict[str, Any]:
    """Return options to connect with; the URL overrides all but the encoding."""
    given = conninfo_to_dict(url)
    limits = {
        "statement_timeout": statement_seconds,
        "lock_timeout": WRITE_TURN_SECONDS,
        "idle_in_transaction_session_timeout": IDLE_SECONDS,
    }
    ours = " ".join(f"-c {name}={value}s" for name, value in limits.items())
    defaults: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 1000 * (statement_seconds + _GRACE_SECONDS),
        "application_name": "vllm-tts-cache",
    }
    return {
        **{name: value for name, value in defaults.items() if name not in given},
        "client_encoding": "UTF8",
        "options": f"{ours} {given.get('options') or ''}".strip(),
    }


def _one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".")
