"""Tables of features whose rows follow a speaker's row to its end.

Nothing that deletes a speaker has to know of these tables.
"""

from typing import Any

from sqlalchemy import DDL, BigInteger, Column, ForeignKey, Table, event

from vllm_tts_cache.catalogue.schema import speaker


def generation(ondelete: str, **options: Any) -> "Column[Any]":
    """Return the column with the generation of a row's speaker.

    Args:
        ondelete: What PostgreSQL does to the row where the speaker is deleted.
        options: Of the column.
    """
    of_speaker = ForeignKey(speaker.c.generation, ondelete=ondelete)
    return Column("generation", BigInteger, of_speaker, **options)


def on_sqlite(table: Table, change: str) -> None:
    """Have SQLite change the row as well, which enforces no foreign keys here.

    Args:
        table: The table, with `generation`.
        change: ``DELETE FROM table`` or ``UPDATE table SET ...``.
    """
    trigger = (
        f"CREATE TRIGGER {table.name}_follows AFTER DELETE ON speaker BEGIN "
        f"{change} WHERE generation = OLD.generation; END"
    )
    event.listen(table, "after_create", DDL(trigger).execute_if(dialect="sqlite"))
