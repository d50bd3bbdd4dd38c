"""A catalogue that is filled from another one: from which, and whether it is whole.

The table is made where a migration begins and stays after it, so that who asks again is
told. Until it is finished nobody else may use what is there.
"""

import time
from dataclasses import dataclass

from sqlalchemy import (
    Column,
    Connection,
    Float,
    MetaData,
    Table,
    Text,
    inspect,
    select,
    text,
)

from vllm_tts_cache.catalogue import dialect
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.errors import ConfigError

_tables = MetaData()

_move = Table(
    "migrated_from",
    _tables,
    Column("source_id", Text, primary_key=True),
    Column("place", Text, nullable=False),
    Column("finished_at", Float),
)

_TURN = "hashtextextended('vllm-tts-cache migrate ' || current_schema(), 0)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A migration into this catalogue.

    Attributes:
        source_id: Of the catalogue, or directory, that it is filled from.
        place: Where that is, for people.
        finished_at: Unix seconds; None while something may be missing.
    """

    source_id: str
    place: str
    finished_at: float | None


def find(db: Connection) -> Move | None:
    """The migration that made this catalogue, if one did."""
    if not inspect(db).has_table(_move.name):
        return None
    row = db.execute(select(_move)).first()
    if row is None:
        return None
    return Move(source_id=row[0], place=row[1], finished_at=row[2])


def begin(db: Connection, source_id: str, place: str) -> None:
    """Write down that the catalogue is being filled."""
    _tables.create_all(db)
    row = {"source_id": source_id, "place": place, "finished_at": None}
    db.execute(_move.insert(), row)


def finish(db: Connection) -> None:
    """All is here: it may be used."""
    db.execute(_move.update().values(finished_at=time.time()))


def check_whole(database: Database) -> None:
    """Refuse a catalogue that is not filled yet.

    Raises: ConfigError, StorageError.
    """
    with database.read() as db:
        move = find(db)
    if move is not None and move.finished_at is None:
        raise ConfigError(
            f"The voice catalogue {database.where} has only a part of what is migrated "
            f"from {move.place}. Run `vllm-tts-cache migrate` again: it goes on."
        )


def take_turn(db: Connection) -> bool:
    """Be the one to fill a catalogue on a server, while the connection lasts."""
    return bool(db.execute(text(f"SELECT pg_try_advisory_lock({_TURN})")).scalar())


def give_turn(db: Connection) -> None:
    """Let another one."""
    db.execute(text(f"SELECT pg_advisory_unlock({_TURN})"))


def last_number(db: Connection, table: str, column: str) -> int:
    """The last number that a row of the table was given, though it be deleted."""
    where = {"table": table, "column": column}
    if dialect.is_postgres(db):
        query = (
            "SELECT pg_sequence_last_value("
            "pg_get_serial_sequence(:table, :column)::regclass)"
        )
    else:
        query = "SELECT seq FROM sqlite_sequence WHERE name = :table"
        del where["column"]
    return int(db.execute(text(query), where).scalar() or 0)
