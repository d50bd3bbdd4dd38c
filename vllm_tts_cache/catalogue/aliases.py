"""Other names of voices: one is looked up where no voice has the name itself."""

from typing import Annotated, Any

import msgspec
from sqlalchemy import BigInteger, Column, Connection, Table, bindparam, select

from vllm_tts_cache.catalogue.names import clean_new, fold
from vllm_tts_cache.catalogue.schema import TEXT, metadata, now, speaker
from vllm_tts_cache.errors import (
    CHOOSE_ANOTHER,
    InvalidSpeakerError,
    SpeakerExistsError,
)

MAX_ALIASES = 20
_Aliases = Annotated[list[str], msgspec.Meta(max_length=MAX_ALIASES)]

# Deleted with their speaker's row; no alias of a tenant is another voice's name.
speaker_alias = Table(
    "speaker_alias",
    metadata,
    Column("tenant", TEXT, primary_key=True),
    Column("alias_key", TEXT, primary_key=True),
    Column("generation", BigInteger, nullable=False, index=True),
)

_row = speaker_alias.c
_IS_TENANTS = _row.tenant == bindparam("tenant")
_IS_ALIAS = _IS_TENANTS & (_row.alias_key == bindparam("alias_key"))
_ITS = select(_row.generation).where(_IS_ALIAS).scalar_subquery()
HAS_ALIAS = speaker.c.generation == _ITS
# Of a voice that has expired, and is not deleted yet.
_FREE = speaker_alias.delete().where(_IS_ALIAS)
_HOLDERS = select(
    speaker.c.generation, speaker.c.name, speaker.c.name_key, speaker.c.expires_at
).where(
    HAS_ALIAS
    | (speaker.c.tenant == bindparam("tenant"))
    & (speaker.c.name_key == bindparam("name_key"))
)


def checked(given: Any) -> list[str]:
    """Return aliases as they are kept. Raises: InvalidSpeakerError."""
    try:
        named = msgspec.convert(given, _Aliases)
        return list({fold(each): clean_new(each) for each in named}.values())
    except (msgspec.ValidationError, InvalidSpeakerError) as exc:
        reason = exc.reason if isinstance(exc, InvalidSpeakerError) else str(exc)
        raise InvalidSpeakerError("aliases", reason) from exc


def an_alias(name_key: str) -> str:
    """Return the hint that a voice has this alias."""
    return f"and has the alias {name_key!r}. Choose another, or PATCH its aliases."


def check_free(db: Connection, tenant: str, generation: int, name_key: str) -> None:
    """Refuse a name that is another voice's, or an alias of one.

    Raises: SpeakerExistsError.
    """
    where = {"tenant": tenant, "name_key": name_key, "alias_key": name_key}
    for other, name, its_key, expires_at in db.execute(_HOLDERS, where):
        has_expired = expires_at is not None and expires_at <= now(db)
        if other != generation and not has_expired:
            hint = CHOOSE_ANOTHER if its_key == name_key else an_alias(name_key)
            raise SpeakerExistsError(name, hint=hint)


def store(db: Connection, tenant: str, generation: int, aliases: list[str]) -> None:
    """Have a voice found by these aliases alone. Raises: SpeakerExistsError."""
    delete(db, generation)
    for key in set(map(fold, aliases)):
        check_free(db, tenant, generation, key)
        row = {"tenant": tenant, "alias_key": key}
        db.execute(_FREE, row)
        db.execute(speaker_alias.insert(), {**row, "generation": generation})


def delete(db: Connection, generation: int) -> None:
    """Delete a voice's aliases."""
    db.execute(speaker_alias.delete().where(_row.generation == generation))


def problems(db: Connection) -> list[str]:
    """Return a line for each voice whose aliases are not those that find it."""
    query = select(speaker.c.generation, speaker.c.extras_json, speaker.c.expires_at)
    query = query.where(speaker.c.extras_json.is_not(None))
    pairs = db.execute(select(_row.generation, _row.alias_key))
    rows = {(number, key) for number, key in pairs}
    found: list[str] = []
    for number, extras_json, expires_at in db.execute(query):
        aliases = msgspec.json.decode(extras_json).get("aliases") or ()
        kept = {(number, fold(alias)) for alias in aliases}
        # Another voice may have taken those of one that has expired.
        if not kept <= rows and (expires_at is None or expires_at > now(db)):
            found.append(f"speaker {number}: an alias is not looked up")
        rows -= kept
    return [*found, *(f"alias of {number}: no voice has it" for number, _ in rows)]
