"""How much voices spoke, by tenant, voice and day."""

import operator
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
    func,
    select,
    tuple_,
)
from sqlalchemy.dialects import postgresql, sqlite

from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.catalogue.schema import TEXT, done_request, metadata, speaker

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
_row = voice_usage.c


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
        return Counts._make(map(operator.add, self, other))


def add(db: Connection, writer: str, batch: str, spoken: Mapping[Key, Counts]) -> None:
    """Add to what was counted before, unless it is the last batch of this writer."""
    insert: Any = postgresql.insert if schema.is_postgres(db) else sqlite.insert
    last = {"request_hash": batch, "done_at": schema.now(db)}
    mark = insert(done_request).values(key_hash=writer, speaker_id="", **last)
    again = {"set_": last, "where": done_request.c.request_hash != batch}
    mark = mark.on_conflict_do_update(index_elements=["key_hash"], **again)
    if db.execute(mark.returning(done_request.c.key_hash)).first() is None:
        return
    new = insert(voice_usage)
    sums = {name: _row[name] + new.excluded[name] for name in Counts._fields}
    new = new.on_conflict_do_update(index_elements=list(Key._fields), set_=sums)
    db.execute(new, [k._asdict() | counts._asdict() for k, counts in spoken.items()])


def delete_before(db: Connection, day: date) -> None:
    """Delete what is older."""
    db.execute(voice_usage.delete().where(_row.day < day.isoformat()))


def between(
    db: Connection,
    tenant: str | None,
    first: date,
    last: date,
    limit: int,
    after: Key | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a page of rows, newest day first, and the sums of all that are asked for.

    ``tenant`` is None for all tenants; ``after`` is the last row of the page before,
    and None for the first page.
    """
    asked = [_row.day >= first.isoformat(), _row.day <= last.isoformat()]
    if tenant is not None:
        asked.append(_row.tenant == tenant)
    fields = Counts._fields
    sums = [func.coalesce(func.sum(_row[name]), 0).label(name) for name in fields]
    totals = db.execute(select(*sums).where(*asked)).mappings().one()
    order = _row.day, _row.tenant, _row.speaker_id
    its = speaker.c  # a bundle may have taken it to another tenant
    is_it = (its.speaker_id == _row.speaker_id) & (its.tenant == _row.tenant)
    query = select(voice_usage, its.name).outerjoin(speaker, is_it).where(*asked)
    if after is not None:
        query = query.where(tuple_(*order) < tuple(after))
    query = query.order_by(*(column.desc() for column in order))
    rows = db.execute(query.limit(limit)).mappings()
    numbers = int(totals["requests"]), int(totals["characters"])
    return [dict(r) for r in rows], Counts(*numbers, float(totals["seconds"]))._asdict()
