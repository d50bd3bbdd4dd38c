"""Rows of two catalogues, side by side: what one has and the other has not."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    bindparam,
    func,
    select,
    tuple_,
)

from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.catalogue.schema import stored_file

T = TypeVar("T")
Row = dict[str, Any]
Pair = tuple[Row | None, Row | None]

PER_PAGE = 500

# Of one catalogue alone: who takes part in it, what it deletes, what it has looked at,
# and the sums of files, which are kept as those are stored.
_NOT_COPIED = {
    "schema_version",
    "usage",
    "deletion",
    "participant",
    "confirmation",
    "imported_file",
}
_IS_REGISTERED = stored_file.c.segment == Segment.REGISTERED.value


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a table, in the order of their key.

    Attributes:
        key: The columns that tell one from another.
        compared: The columns in which two of one key may differ.
        where: Which of them; all if there is none.
    """

    table: Table
    key: tuple[str, ...]
    compared: tuple[str, ...]
    where: "list[ColumnElement[bool]]" = field(
        default_factory=list["ColumnElement[bool]"]
    )

    def key_of(self, row: Row) -> tuple[Any, ...]:
        """What tells the row from others."""
        return tuple(row[name] for name in self.key)

    def read(self, database: Database) -> Iterator[Row]:
        """All of them; holds no connection while the caller thinks."""
        columns = [self.table.c[name] for name in self.key]
        query = select(self.table).where(*self.where).order_by(*columns)
        after: list[ColumnElement[bool]] = []
        while True:
            with database.read() as db:
                rows = db.execute(query.where(*after).limit(PER_PAGE)).mappings()
                page = [dict(row) for row in rows]
            yield from page
            if len(page) < PER_PAGE:
                return
            after = [tuple_(*columns) > tuple_(*self.key_of(page[-1]))]

    def pairs(self, source: Database, target: Database) -> Iterator[Pair]:
        """Those of both, by key; None where one has no such row."""
        ours, theirs = self.read(source), self.read(target)
        one, other = next(ours, None), next(theirs, None)
        while one is not None or other is not None:
            is_ours = other is None or (one and self.key_of(one) <= self.key_of(other))
            is_theirs = one is None or (
                other and self.key_of(other) <= self.key_of(one)
            )
            yield (one if is_ours else None), (other if is_theirs else None)
            one = next(ours, None) if is_ours else one
            other = next(theirs, None) if is_theirs else other

    def is_same(self, pair: Pair) -> bool:
        """Whether both have the row, and the same one."""
        one, other = pair
        if one is None or other is None:
            return False
        return all(one[name] == other[name] for name in self.compared)

    def count(self, database: Database) -> int:
        """How many there are."""
        query = select(func.count()).select_from(self.table).where(*self.where)
        with database.read() as db:
            return db.execute(query).scalar_one()

    def insert(self, db: Connection, rows: Sequence[Row]) -> None:
        """Write rows as they are."""
        db.execute(self.table.insert(), rows)

    def delete(self, db: Connection, rows: Sequence[Row]) -> None:
        """Remove rows by their keys."""
        where = (self.table.c[name] == bindparam(f"of_{name}") for name in self.key)
        keys = [{f"of_{name}": row[name] for name in self.key} for row in rows]
        db.execute(self.table.delete().where(and_(*where)), keys)


# Stored in one moment, in one length: it is the same one.
FILES = Rows(
    stored_file,
    ("audio_sha256", "kind"),
    ("num_bytes", "created_at"),
    [_IS_REGISTERED],
)


def tables() -> list[Rows]:
    """All that is copied beside files: voices first, then what is told of them."""
    return [
        _all_of(table)
        for table in schema.metadata.sorted_tables
        if table is not stored_file and table.name not in _NOT_COPIED
    ]


def batches(some: Iterable[T], size: int = PER_PAGE) -> Iterator[list[T]]:
    """Cut into lists that are no longer than that."""
    batch: list[T] = []
    for each in some:
        batch.append(each)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def copy(source: Database, target: Database, rows: Rows) -> Iterator[int]:
    """Make the target's rows those of the source; yields how many were looked at.

    What is to go goes first, all of it: a name that it has may be another's by now.
    """
    for pairs in batches(rows.pairs(source, target)):
        stale = [pair[1] for pair in pairs if pair[1] and not rows.is_same(pair)]
        if stale:
            with target.write() as db:
                rows.delete(db, stale)
    for pairs in batches(rows.pairs(source, target)):
        missing = [pair[0] for pair in pairs if pair[0] and pair[1] is None]
        if missing:
            with target.write() as db:
                rows.insert(db, missing)
        yield len(pairs)


def _all_of(table: Table) -> Rows:
    key = tuple(column.name for column in table.primary_key.columns)
    names = tuple(column.name for column in table.columns)
    where: list[ColumnElement[bool]] = []
    if {"audio_sha256", "kind"} <= set(names):  # of files, of which some stay
        stored = select(stored_file.c.audio_sha256).where(_IS_REGISTERED)
        where = [table.c.audio_sha256.in_(stored)]
    return Rows(table, key, names, where)
