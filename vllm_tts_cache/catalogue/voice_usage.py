"""How much voices spoke, by tenant, voice and day."""

from collections.abc import Mapping
from datetime import date
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Float,
    Index,
    Table,
    bindparam,
    func,
    select,
    tuple_,
)

from vllm_tts_cache.catalogue.schema import TEXT, metadata, speaker

# Of a deleted voice its random id stays, and no name.
voice_usage = Table(
    "voice_usage",
    metadata,
    Column("day", TEXT, primary_key=True),
    Column("tenant", TEXT, primary_key=True),
    Column("speaker_id", TEXT, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("characters", BigInteger, nullable=False),
    Column("seconds", Float, nullable=False),
    Index("voice_usage_tenant", "tenant", "day"),
)
_COUNTED = ("requests", "characters", "seconds")
_row = voice_usage.c
_ADD = (
    voice_usage.update()
    .where(
        _row.day == bindparam("of_day"),
        _row.tenant == bindparam("of_tenant"),
        _row.speaker_id == bindparam("of_speaker"),
    )
    .values({name: _row[name] + bindparam(f"more_{name}") for name in _COUNTED})
)


class Key(NamedTuple):
    """Whose speech is counted; the day is an ISO 8601 date, in UTC."""

    day: str
    tenant: str
    speaker_id: str


class Counts(NamedTuple):
    """What was spoken."""

    requests: int = 0
    characters: int = 0
    seconds: float = 0.0

    def plus(self, other: "Counts") -> "Counts":
        """Return the sums."""
        return Counts(
            self.requests + other.requests,
            self.characters + other.characters,
            self.seconds + other.seconds,
        )


def add(db: Connection, spoken: Mapping[Key, Counts]) -> None:
    """Add to what was counted before."""
    for key, counts in spoken.items():
        where = {"of_day": key.day, "of_tenant": key.tenant}
        where["of_speaker"] = key.speaker_id
        more = {f"more_{n}": value for n, value in counts._asdict().items()}
        if db.execute(_ADD, where | more).rowcount == 0:
            db.execute(voice_usage.insert(), key._asdict() | counts._asdict())


def delete_before(db: Connection, day: date) -> None:
    """Delete what is older."""
    db.execute(voice_usage.delete().where(_row.day < day.isoformat()))


def between(
    db: Connection, tenant: str | None, first: date, last: date, limit: int, after: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a page of rows, newest day first, and the sums of all that are asked for.

    Args:
        db: A connection.
        tenant: Whose; None for all tenants.
        first: The first day.
        last: The last day.
        limit: Rows at most.
        after: The cursor of the last row of the page before; empty for the first page.
    """
    asked = [_row.day >= first.isoformat(), _row.day <= last.isoformat()]
    if tenant is not None:
        asked.append(_row.tenant == tenant)
    sums = [func.coalesce(func.sum(_row[name]), 0).label(name) for name in _COUNTED]
    totals = db.execute(select(*sums).where(*asked)).mappings().one()
    order = _row.day, _row.tenant, _row.speaker_id
    query = (
        select(voice_usage, speaker.c.name)
        .join(speaker, speaker.c.speaker_id == _row.speaker_id, isouter=True)
        .where(*asked)
    )
    if after:
        day, _, rest = after.partition("/")
        tenant, _, speaker_id = rest.partition("/")
        query = query.where(tuple_(*order) < (day, tenant, speaker_id))
    query = query.order_by(*(column.desc() for column in order))
    rows = db.execute(query.limit(limit)).mappings()
    shown = [
        {**row, "cursor": "/".join((row["day"], row["tenant"], row["speaker_id"]))}
        for row in rows
    ]
    return shown, {
        "requests": int(totals["requests"]),
        "characters": int(totals["characters"]),
        "seconds": float(totals["seconds"]),
    }
