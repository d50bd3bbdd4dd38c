"""Connections that end with their pool, and cross no fork.

SQLite keeps its idea of which file locks this process holds in memory: a fork copies
the idea but not the locks, and a connection that the child opens later would believe
it. A connection to a server would be used by two. So nothing idle is open at a fork,
and what is in use then is the parent's.
"""

import os
from weakref import WeakSet

from sqlalchemy import Engine
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

_engines: "WeakSet[Engine]" = WeakSet()


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
