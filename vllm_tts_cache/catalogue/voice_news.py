"""What a webhook is told of voices: a row for each, with the last of its news.

A row keeps what was or is to be told, so it outlives its speaker, whose deletion is
news as well. Several pieces of news of one voice are told as the last of them.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Delete,
    Float,
    Index,
    Integer,
    Table,
    Update,
    case,
    exists,
    func,
    literal,
    or_,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite

from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.catalogue.schema import (
    LOOKED_AT,
    TEXT,
    failed_encode,
    generation,
    metadata,
    on_sqlite,
    speaker,
    stored_file,
)

State = Literal["registered", "ready", "failed", "deleted"]

# ``number`` is the last generation, ``since`` is when the state began. It may be told
# from ``next_try`` on, by the database's clock; a server that tells it moves that on,
# so that others leave it alone.
voice_news = Table(
    "voice_news",
    metadata,
    Column("speaker_id", TEXT, primary_key=True),
    Column("tenant", TEXT, nullable=False),
    generation("SET NULL", nullable=True),
    Column("number", BigInteger, nullable=False),
    Column("state", TEXT, nullable=False),
    Column("reason", TEXT),
    Column("since", Float, nullable=False),
    Column("is_told", Integer, nullable=False),
    Column("num_attempts", Integer, nullable=False),
    Column("next_try", Float, nullable=False, default=0.0),
    Index("voice_news_generation", "generation", "state"),
    Index("voice_news_try", "is_told", "next_try"),
)
on_sqlite(voice_news, "UPDATE voice_news SET generation = NULL")
_row = voice_news.c
_KNOWN = {"since": 0.0, "is_told": 1, "num_attempts": 0}
_ONE = select(_row.speaker_id).limit(1)
_LIVING = "registered", "ready", "failed"
_IS_THERE = exists().where(speaker.c.speaker_id == _row.speaker_id)
_IS_GONE = _row.generation.is_(None) & _row.state.in_(_LIVING) & ~_IS_THERE
_CHANGED_AT_ONCE = 500
# Others leave a message alone for so long while it is sent.
CLAIM_SECONDS = 120.0


class News(NamedTuple):
    """What is to be told of a voice; a deleted one has no name any more."""

    speaker_id: str
    tenant: str
    number: int
    state: State
    reason: str | None
    since: float
    num_attempts: int
    name: str | None


def begin(db: Connection) -> None:
    """Insert rows for all voices, once: of those that are there, only the end is news.

    A row that is no voice's keeps that it was done.
    """
    if db.execute(_ONE).first() is not None:
        return
    mark = {"speaker_id": "", "tenant": "", "generation": None, "state": "deleted"}
    db.execute(voice_news.insert(), {**mark, "number": 0, **_KNOWN})
    columns = speaker.c.speaker_id, speaker.c.tenant, *2 * (speaker.c.generation,)
    values = literal("ready"), *(literal(value) for value in _KNOWN.values())
    names = ["speaker_id", "tenant", "generation", "number", "state", *_KNOWN]
    db.execute(voice_news.insert().from_select(names, select(*columns, *values)))


def last_generation(db: Connection) -> int:
    """Return the highest generation that has a row."""
    return db.execute(select(func.max(_row.generation))).scalar() or 0


def has_new(db: Connection, after: int) -> bool:
    """Whether there are voices behind a generation."""
    query = select(speaker.c.generation).where(speaker.c.generation > after)
    return db.execute(query.limit(1)).first() is not None


def adopt(db: Connection, after: int) -> None:
    """Insert rows for new voices, and those replaced, behind a generation."""
    query = select(speaker.c.speaker_id, speaker.c.tenant, speaker.c.generation)
    query = query.where(speaker.c.generation > after).order_by(speaker.c.generation)
    begins: dict[str, Any] = {"state": "registered", **_KNOWN}
    rows = [
        {"speaker_id": id_, "tenant": tenant, "generation": n, "number": n, **begins}
        for id_, tenant, n in db.execute(query.limit(_CHANGED_AT_ONCE))
    ]
    if not rows:
        return
    dialect = postgresql if schema.is_postgres(db) else sqlite
    insert = dialect.insert(voice_news).values(rows)
    given = insert.excluded
    of_it = {"tenant": given.tenant, "generation": given.generation}
    anew = insert.on_conflict_do_update(
        index_elements=[_row.speaker_id],
        set_={**of_it, "number": given.generation, "reason": None, **begins},
        where=_row.number != given.generation,
    )
    db.execute(anew)


def unsettled(
    db: Connection, fingerprints: Sequence[str], after: int, limit: int
) -> tuple[list[tuple[int, str, str]], int]:
    """Return generation, tenant and id of voices that are ready, or failed, by now.

    Perhaps: not all that they need of encoders with these fingerprints may be there.
    And return the generation behind which to go on, as ``after``.
    """
    has_encoding, has_failed = (
        exists().where(
            table.c.audio_sha256 == speaker.c.audio_sha256,
            table.c.artifact.in_(fingerprints),
        )
        for table in (stored_file, failed_encode)
    )
    is_embedding = speaker.c.audio_sha256.is_(None)
    may_settle = or_(
        (_row.state == "registered") & (has_encoding | has_failed | is_embedding),
        (_row.state == "failed") & has_encoding & ~has_failed,
    )
    columns = _row.generation, _row.tenant, _row.speaker_id
    last = after + LOOKED_AT
    is_its = speaker.c.generation == _row.generation
    query = select(*columns).join_from(voice_news, speaker, is_its)
    query = query.where(_row.generation > after, _row.generation <= last, may_settle)
    rows = db.execute(query.order_by(_row.generation).limit(limit)).all()
    found = [(number, tenant, id_) for number, tenant, id_ in rows]
    if len(found) == limit:
        return found, found[-1][0]
    return found, last if last < last_generation(db) else 0


def settle(db: Connection, number: int, state: State, reason: str | None) -> bool:
    """Have the webhook told that a voice is ready, or failed; return if that is news.

    What is ready is never said to have failed, by a server that looked a while ago.
    """
    before = ("registered", "failed") if state == "ready" else ("registered",)
    is_news = _row.generation == number, _row.state.in_(before)
    new = _news(db, state) | {"reason": reason}
    changed = db.execute(voice_news.update().where(*is_news).values(**new))
    return changed.rowcount > 0


def has_gone(db: Connection) -> bool:
    """Whether voices were deleted of which that is not noted."""
    return db.execute(_ONE.where(_IS_GONE)).first() is not None


def note_gone(db: Connection) -> None:
    """Have the webhook told of voices that were deleted, of many by several calls."""
    gone = select(_row.speaker_id).where(_IS_GONE).limit(_CHANGED_AT_ONCE)
    ids = list(db.execute(gone).scalars())
    new = _news(db, "deleted") | {"reason": None}
    db.execute(voice_news.update().where(_row.speaker_id.in_(ids)).values(**new))


def is_due(db: Connection) -> bool:
    """Whether there are news to be told now."""
    return db.execute(_ONE.where(_due(db))).first() is not None


def claim(db: Connection, limit: int) -> list[News]:
    """Return news to be told now; for `CLAIM_SECONDS` no other server gets them."""
    fields = News._fields
    columns = [speaker.c.name if f == "name" else _row[f] for f in fields]
    joined = voice_news.outerjoin(speaker, speaker.c.generation == _row.generation)
    query = select(*columns).select_from(joined).where(_due(db))
    rows = db.execute(query.order_by(_row.next_try).limit(limit)).all()
    if found := [News(*row) for row in rows]:
        ids = [news.speaker_id for news in found]
        claimed = voice_news.update().where(_row.speaker_id.in_(ids))
        db.execute(claimed.values(next_try=schema.now(db) + CLAIM_SECONDS))
    return found


def told(db: Connection, news: News) -> None:
    """Note that news were told, or given up; of a deleted voice nothing is kept."""
    update = voice_news.update().values(is_told=1, next_try=0.0)
    _change(db, news, voice_news.delete() if news.state == "deleted" else update)


def failed(db: Connection, news: News, seconds: float) -> None:
    """Have news told again after a time."""
    next_try = schema.now(db) + seconds
    values = {"num_attempts": news.num_attempts + 1, "next_try": next_try}
    _change(db, news, voice_news.update().values(**values))


def _change(db: Connection, news: News, change: Update | Delete) -> None:
    """Change the row of news; of newer ones, only that they may be told now."""
    is_its = _row.speaker_id == news.speaker_id
    same = is_its, _row.number == news.number, _row.state == news.state
    if not db.execute(change.where(*same)).rowcount:
        db.execute(voice_news.update().where(is_its).values(next_try=0.0))


def _news(db: Connection, state: State) -> dict[str, Any]:
    now = schema.now(db)
    # What is being told arrives before this does; what failed is told no more.
    next_try = case((_row.next_try > now + CLAIM_SECONDS, 0.0), else_=_row.next_try)
    return {**_KNOWN, "state": state, "is_told": 0, "since": now, "next_try": next_try}


def _due(db: Connection) -> "ColumnElement[bool]":
    is_true = _row.generation.is_not(None) | (_row.state == "deleted")
    return (_row.is_told == 0) & (_row.next_try <= schema.now(db)) & is_true
