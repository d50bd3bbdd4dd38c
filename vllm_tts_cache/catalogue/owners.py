"""Owners of audios, and usage of tenants; the caller provides the transaction.

The transactions that register and delete also update ``tenant_usage`` and
``tenant_audio``, so that a limit is checked by reading one row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, func, literal, select, text, union_all

from vllm_tts_cache.catalogue.schema import consent, speaker, tenant_audio, tenant_usage

_COLUMNS = speaker.c.audio_sha256, consent.c.audio_sha256


class TenantUsage(NamedTuple):
    """The usage of one tenant.

    ``audio_bytes`` are of reference audio and consent recordings; a clip that the
    tenant has more than once counts once.
    """

    num_voices: int = 0
    num_consents: int = 0
    audio_bytes: int = 0


_COUNTS = tuple(tenant_usage.c[name] for name in TenantUsage._fields)
# The sums of PostgreSQL are decimal numbers.
_SUMS = """SELECT t.tenant,
    (SELECT COUNT(*) FROM speaker s WHERE s.tenant = t.tenant),
    (SELECT COUNT(*) FROM consent c WHERE c.tenant = t.tenant),
    CAST((SELECT COALESCE(SUM(a.num_bytes), 0) FROM tenant_audio a
        WHERE a.tenant = t.tenant) AS BIGINT)
    FROM (SELECT tenant FROM speaker UNION SELECT tenant FROM consent
        UNION SELECT tenant FROM tenant_audio) t"""
_RECOUNT = (
    "DELETE FROM tenant_usage",
    "DELETE FROM tenant_audio",
    """INSERT INTO tenant_audio (tenant, audio_sha256, num_owners, num_bytes)
    SELECT o.tenant, o.audio_sha256, COUNT(*), COALESCE(MAX(f.num_bytes), 0)
    FROM (SELECT tenant, audio_sha256 FROM speaker WHERE audio_sha256 IS NOT NULL
        UNION ALL SELECT tenant, audio_sha256 FROM consent) o
    LEFT JOIN stored_file f ON f.audio_sha256 = o.audio_sha256 AND f.artifact = 'audio'
    GROUP BY o.tenant, o.audio_sha256""",
    f"INSERT INTO tenant_usage (tenant, num_voices, num_consents, audio_bytes) {_SUMS}",
)

_OWNERS = [select(c).where(c == bindparam("of_sha")).limit(1) for c in _COLUMNS]
_IS_TENANT = tenant_usage.c.tenant == bindparam("of_tenant")
_IS_OF = (tenant_audio.c.tenant == bindparam("of_tenant")) & (
    tenant_audio.c.audio_sha256 == bindparam("of_sha")
)
_OF_TENANT = select(*_COUNTS).where(_IS_TENANT)
_NUM_VOICES = select(func.sum(tenant_usage.c.num_voices))
_MORE = {c: c + bindparam(f"more_{c.name}") for c in _COUNTS}
_ADD = tenant_usage.update().where(_IS_TENANT).values(_MORE)
_MORE_OWNERS = tenant_audio.c.num_owners + bindparam("more")
_ADD_OWNERS = tenant_audio.update().where(_IS_OF).values(num_owners=_MORE_OWNERS)
_OWNED = select(tenant_audio.c.num_owners, tenant_audio.c.num_bytes).where(_IS_OF)
_INSERT, _DELETE = tenant_audio.insert(), tenant_audio.delete().where(_IS_OF)

_MAX_NAMED = 10  # differences that a query lists at most


def is_owned(db: Connection, audio_sha256: str) -> bool:
    """Whether a speaker or a consent recording has this audio."""
    where = {"of_sha": audio_sha256}
    return any(db.execute(query, where).first() for query in _OWNERS)


def audio_between(db: Connection, first: str, last: str) -> set[str]:
    """Return the owned addresses from ``first`` to before ``last``."""
    return _found(db, lambda c: select(c).where(c >= first, c < last))


def audio_prefixes(db: Connection) -> set[str]:
    """Return the first two digits of all owned addresses."""
    return _found(
        db, lambda c: select(func.substr(c, 1, 2)).where(c.is_not(None)).distinct()
    )


def _found(db: Connection, query_of: Callable[[Any], Any]) -> set[str]:
    """Return what a query finds of speakers and of consent recordings."""
    return {each for c in _COLUMNS for each in db.execute(query_of(c)).scalars()}


def of_tenant(db: Connection, tenant: str) -> TenantUsage:
    """Return a tenant's usage; reads one row."""
    row = db.execute(_OF_TENANT, {"of_tenant": tenant}).first()
    return TenantUsage() if row is None else TenantUsage(*row)


def of_all(db: Connection) -> dict[str, TenantUsage]:
    """Return each tenant's usage; reads as many rows as there are tenants."""
    rows = db.execute(select(tenant_usage.c.tenant, *_COUNTS))
    return {tenant: TenantUsage(*counts) for tenant, *counts in rows}


def num_voices(db: Connection) -> int:
    """Return how many voices all tenants have; reads a row for each tenant."""
    return int(db.execute(_NUM_VOICES).scalar() or 0)


def count(
    db: Connection,
    tenant: str,
    *,
    voices: int = 0,
    consents: int = 0,
    audio_bytes: int = 0,
) -> None:
    """Add to a tenant's usage; negative numbers subtract."""
    more = TenantUsage(voices, consents, audio_bytes)._asdict()
    given = {f"more_{name}": number for name, number in more.items()}
    if db.execute(_ADD, {"of_tenant": tenant, **given}).rowcount == 0:
        db.execute(tenant_usage.insert(), {"tenant": tenant, **more})


def own(db: Connection, tenant: str, audio_sha256: str, num_bytes: int) -> None:
    """Count one more voice or recording of a tenant with this audio."""
    where = {"of_tenant": tenant, "of_sha": audio_sha256}
    if db.execute(_ADD_OWNERS, where | {"more": 1}).rowcount == 0:
        row = {"tenant": tenant, "audio_sha256": audio_sha256, "num_owners": 1}
        db.execute(_INSERT, row | {"num_bytes": num_bytes})
        count(db, tenant, audio_bytes=num_bytes)


def disown(db: Connection, tenant: str, audio_sha256: str) -> None:
    """Count one owner less; without owners the audio's bytes count no longer."""
    where = {"of_tenant": tenant, "of_sha": audio_sha256}
    db.execute(_ADD_OWNERS, where | {"more": -1})
    row = db.execute(_OWNED, where).first()
    if row is not None and row[0] <= 0:
        db.execute(_DELETE, where)
        count(db, tenant, audio_bytes=-row[1])


def problems(db: Connection) -> list[str]:
    """Return where the usage tables differ from sums over rows; reads all rows."""
    kept = of_all(db)
    rows = db.execute(text(_SUMS))
    counted = {tenant: TenantUsage(*sums) for tenant, *sums in rows}
    found = [
        f"usage of tenant {name}: {kept.get(name)}, the rows say {counted.get(name)}"
        for name in sorted(kept.keys() | counted.keys())
        if kept.get(name, TenantUsage()) != counted.get(name, TenantUsage())
    ]
    return found + [
        f"audio {sha}: the number of owners of tenant {tenant} differs from the rows"
        for tenant, sha in _differing_audio(db)
    ]


def recount(db: Connection) -> None:
    """Rebuild the usage tables from the rows."""
    for statement in _RECOUNT:
        db.execute(text(statement))


def _differing_audio(db: Connection) -> list[tuple[str, str]]:
    """Sort owners and what is kept of them once: each pair must add up to nothing."""
    owned = [
        select(table.c.tenant, table.c.audio_sha256, literal(1).label("number"))
        for table in (speaker, consent)
    ]
    columns = tenant_audio.c
    kept = select(columns.tenant, columns.audio_sha256, -columns.num_owners)
    rows = union_all(*owned, kept).subquery().c
    # Only a row that is kept has an audio without owners as 0.
    is_wrong = (func.sum(rows.number) != 0) | (func.max(rows.number) == 0)
    key = rows.tenant, rows.audio_sha256
    query = select(*key).where(rows.audio_sha256.is_not(None)).group_by(*key)
    found = db.execute(query.having(is_wrong).limit(_MAX_NAMED))
    return sorted((tenant, sha) for tenant, sha in found)
