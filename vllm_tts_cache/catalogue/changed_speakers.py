"""Changes of speakers that API servers are told of, which remember what rows said.

Where several machines reach the catalogue, a server may speak a voice by the row that
it remembers: whoever changes a row notes it in the same transaction, and answers when
all that are waited for (`leases`) have heard. On one machine every request reads the
row, and nothing is noted.
"""

from sqlalchemy import Connection, func, select

from vllm_tts_cache.catalogue.dialect import is_postgres
from vllm_tts_cache.catalogue.schema import changed_speaker as changed

# Writers take turns, so the last one has the highest number.
NEWEST = select(func.coalesce(func.max(changed.c.number), 0))
# Who has missed more deletes everything that it remembers.
MAX_TOLD = 1000


def note(db: Connection, speaker_id: str) -> int:
    """The speaker's row changes or goes in this transaction; returns the change."""
    if not is_postgres(db):
        return 0
    new = changed.insert().values(speaker_id=speaker_id)
    return db.execute(new.returning(changed.c.number)).scalar_one()


def newest(db: Connection) -> int:
    """The number of the last change; 0 if there was none."""
    if not is_postgres(db):
        return 0
    return db.execute(NEWEST).scalar_one()


def since(db: Connection, number: int) -> tuple[int, list[str]]:
    """The last change, and the speakers that changed after the one given.

    There are ``MAX_TOLD`` + 1 at most, which says that there are more.
    """
    query = select(changed.c.number, changed.c.speaker_id)
    after = query.where(changed.c.number > number).order_by(changed.c.number)
    rows = db.execute(after.limit(MAX_TOLD + 1)).all()
    if len(rows) > MAX_TOLD:
        return newest(db), [row[1] for row in rows]
    return (rows[-1][0] if rows else number), [row[1] for row in rows]


def delete(db: Connection, number: int) -> None:
    """All have heard of the changes up to this one. The last one stays, to count on."""
    last = select(func.max(changed.c.number)).scalar_subquery()
    db.execute(
        changed.delete().where(changed.c.number <= number, changed.c.number < last)
    )
