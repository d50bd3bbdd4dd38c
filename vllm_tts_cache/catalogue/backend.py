"""What the catalogue needs of a database; SQLite and PostgreSQL have it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from sqlalchemy import Connection, Engine, event

T = TypeVar("T")


class Backend(Protocol):
    """Connections to one database, and what goes wrong with them.

    Attributes:
        where: What it is called before people; never with a password.
        reading: Each statement by itself, of what is committed.
        writing: Transactions of which one goes on at a time, in all processes: what
            one has read still holds when it writes. Files are moved in them too, so
            that none can be run again: it waits for its turn instead.
        migrating: As ``writing``, for what takes long and others wait for.
        snapshots: Transactions that read the state of one moment.
        renewing: As ``reading``, on a connection that nothing else has: of leases.
        quick: As ``reading``, without transactions, for who must not wait long.
        has_leases: Whether several machines may reach it, so that no lock tells who is
            alive.
    """

    has_leases: bool

    @property
    def where(self) -> str: ...  # noqa: D102  see the class
    @property
    def reading(self) -> Engine: ...  # noqa: D102
    @property
    def writing(self) -> Engine: ...  # noqa: D102
    @property
    def migrating(self) -> Engine: ...  # noqa: D102
    @property
    def snapshots(self) -> Engine: ...  # noqa: D102
    @property
    def renewing(self) -> Engine: ...  # noqa: D102
    @property
    def quick(self) -> Engine: ...  # noqa: D102

    def opening(self) -> AbstractContextManager[None]:
        """Hold the turn to make or migrate it, having made what a first use needs."""
        ...

    def errors(self) -> AbstractContextManager[None]:
        """Turn an error of the database into the storage error it means."""
        ...

    def retried(self, read: Callable[[], T]) -> T:
        """Do what only reads, and once more where its connection had been lost."""
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
