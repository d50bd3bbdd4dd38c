"""What is said otherwise in SQLite and in PostgreSQL."""

import time
from typing import Any

from sqlalchemy import ColumnElement, Connection, Integer, Text, text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


class _Contains(FunctionElement[int]):
    """Where a text has a part, from 1; 0 if nowhere."""

    type = Integer()
    inherit_cache = True


class _Joined(FunctionElement[str]):
    """The texts of all rows, with a space between."""

    type = Text()
    inherit_cache = True


@compiles(_Contains, "sqlite")
def _instr(element: _Contains, compiler: SQLCompiler, **kw: Any) -> str:
    return f"instr({compiler.process(element.clauses, **kw)})"


@compiles(_Contains, "postgresql")
def _strpos(element: _Contains, compiler: SQLCompiler, **kw: Any) -> str:
    return f"strpos({compiler.process(element.clauses, **kw)})"


# SQLAlchemy's own, aggregate_strings, renders its separator anew at each run.
@compiles(_Joined, "sqlite")
def _group_concat(element: _Joined, compiler: SQLCompiler, **kw: Any) -> str:
    return f"group_concat({compiler.process(element.clauses, **kw)}, ' ')"


@compiles(_Joined, "postgresql")
def _string_agg(element: _Joined, compiler: SQLCompiler, **kw: Any) -> str:
    return f"string_agg({compiler.process(element.clauses, **kw)}, ' ')"


def contains(column: "ColumnElement[str]", part: str) -> "ColumnElement[bool]":
    """Whether the text contains the part; nothing in it has a meaning of its own."""
    return _Contains(column, part) > 0


def joined(column: "ColumnElement[str]") -> "ColumnElement[str]":
    """The texts of all rows, with a space between."""
    return _Joined(column)


def is_postgres(db: Connection) -> bool:
    """Whether it is PostgreSQL's; else it is SQLite's."""
    return db.dialect.name == "postgresql"


def now(db: Connection) -> float:
    """Unix seconds: of the server, which all machines have in common, or of ours."""
    if not is_postgres(db):
        return time.time()
    query = text("SELECT date_part('epoch', clock_timestamp())")
    return float(db.execute(query).scalar_one())


def check_turn(db: Connection) -> None:
    """See that a write transaction still has its turn, just before a file is removed.

    A server takes the turn from a process that was frozen for too long: what that had
    read need not hold any more, and when it goes on it must not act on it.

    Raises: DBAPIError.
    """
    if is_postgres(db):
        db.execute(text("SELECT 1"))


def problems(db: Connection) -> list[str]:
    """What is wrong with a file itself; reads it all. A server looks after its own."""
    if is_postgres(db):
        return []
    lines = db.execute(text("PRAGMA integrity_check")).scalars()
    return [line for line in lines if line != "ok"]


def raise_sequence(db: Connection, table: str, column: str, value: int) -> None:
    """Never hand out a number up to this one in the table, within a transaction."""
    where = {"table": table, "column": column, "value": value}
    if is_postgres(db):
        # The last number that it gave, and whether it gave any.
        raised = (
            "SELECT setval(pg_get_serial_sequence(:table, :column), :value) WHERE"
            " :value > coalesce(pg_sequence_last_value("
            "pg_get_serial_sequence(:table, :column)::regclass), 0)"
        )
        db.execute(text(raised), where)
        return
    known = db.execute(
        text("SELECT seq FROM sqlite_sequence WHERE name = :table"), where
    ).scalar()
    if known is None:
        db.execute(text("INSERT INTO sqlite_sequence VALUES (:table, :value)"), where)
    elif known < value:
        db.execute(
            text("UPDATE sqlite_sequence SET seq = :value WHERE name = :table"), where
        )
