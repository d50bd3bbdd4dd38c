"""Connections that end with their pool."""

from sqlalchemy.pool import ConnectionPoolEntry, QueuePool


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
