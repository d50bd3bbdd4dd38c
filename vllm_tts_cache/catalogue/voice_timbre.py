"""How registered voices sound, by an encoder that tells speakers apart."""

from collections.abc import Sequence

from sqlalchemy import (
    Column,
    Connection,
    Index,
    LargeBinary,
    Table,
    exists,
    literal,
    or_,
    select,
)

from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.catalogue.schema import (
    LOOKED_AT,
    TEXT,
    done_request,
    generation,
    metadata,
    on_sqlite,
    speaker,
)

# The vector of what nobody speaks in.
NOTHING = b""

# ``vector`` has 256 values of int8: a hundred thousand of a tenant are 26 MB.
voice_timbre = Table(
    "voice_timbre",
    metadata,
    generation("CASCADE", primary_key=True, autoincrement=False),
    Column("tenant", TEXT, nullable=False),
    Column("vector", LargeBinary, nullable=False),
    Index("voice_timbre_tenant", "tenant", "generation"),
)
on_sqlite(voice_timbre, "DELETE FROM voice_timbre")
_row = voice_timbre.c
_HAS_ONE = exists().where(_row.generation == speaker.c.generation)


def keep(db: Connection, number: int, audio_sha256: str, vector: bytes) -> None:
    """Keep the vector of a generation's audio, unless that is gone or has one."""
    columns = speaker.c.generation, speaker.c.tenant, literal(vector, LargeBinary)
    is_it = speaker.c.generation == number, speaker.c.audio_sha256 == audio_sha256
    still = select(*columns).where(*is_it, ~_HAS_ONE)
    fields = ["generation", "tenant", "vector"]
    db.execute(voice_timbre.insert().from_select(fields, still))


def of_tenant(db: Connection, tenant: str, limit: int) -> list[tuple[int, bytes]]:
    """Return generations and vectors of a tenant's voices, the newest first."""
    heard = _row.tenant == tenant, _row.vector != NOTHING
    query = select(_row.generation, _row.vector).where(*heard)
    rows = db.execute(query.order_by(_row.generation.desc()).limit(limit))
    return [(number, vector) for number, vector in rows]


def names(db: Connection, generations: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Return names and their keys of few generations, but of those that are over."""
    columns = speaker.c.generation, speaker.c.name, speaker.c.name_key
    lasts = or_(speaker.c.expires_at.is_(None), speaker.c.expires_at > schema.now(db))
    query = select(*columns).where(speaker.c.generation.in_(generations), lasts)
    return {number: (name, name_key) for number, name, name_key in db.execute(query)}


def next_unheard(db: Connection, after: int) -> tuple[int, str | None]:
    """Return the next generation without a vector, and its audio.

    None for the audio: up to that generation there is none, and behind it there may be.
    """
    last = after + LOOKED_AT
    query = select(speaker.c.generation, speaker.c.audio_sha256).where(
        speaker.c.generation > after,
        speaker.c.generation <= last,
        speaker.c.audio_sha256.is_not(None),
        ~_HAS_ONE,
    )
    row = db.execute(query.order_by(speaker.c.generation).limit(1)).first()
    return (last, None) if row is None else (row[0], row[1])


def was_done(db: Connection, key_hash: str) -> bool:
    """Whether a request with an idempotency key was done."""
    is_it = done_request.c.key_hash == key_hash
    return db.execute(select(done_request.c.key_hash).where(is_it)).first() is not None
