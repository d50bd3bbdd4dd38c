"""Whose an audio is, and how much each tenant has; the caller has the transaction.

Rows of ``tenant_usage`` and ``tenant_audio`` are kept in the transactions that register
and delete, so that a limit is asked for by reading one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    except_,
    func,
    select,
    text,
    union_all,
)

from vllm_tts_cache.catalogue.schema import (
    consent,
    slices,
    speaker,
    tenant_audio,
    tenant_usage,
)

_COLUMNS = speaker.c.audio_sha256, consent.c.audio_sha256

_COUNTS = (
    tenant_usage.c.num_voices,
    tenant_usage.c.num_consents,
    tenant_usage.c.audio_bytes,
)
_NAMES = tuple(column.name for column in _COUNTS)
_EMPTY = ("DELETE FROM tenant_usage", "DELETE FROM tenant_audio")
# The sums of PostgreSQL are decimal numbers.
_SUMS = """SELECT t.tenant,
    (SELECT COUNT(*) FROM speaker s WHERE s.tenant = t.tenant),
    (SELECT COUNT(*) FROM consent c WHERE c.tenant = t.tenant),
    CAST((SELECT COALESCE(SUM(a.num_bytes), 0) FROM tenant_audio a
        WHERE a.tenant = t.tenant) AS BIGINT)
    FROM (SELECT tenant FROM speaker UNION SELECT tenant FROM consent
        UNION SELECT tenant FROM tenant_audio) t"""
_FILL = (
    """INSERT INTO tenant_audio (tenant, audio_sha256, num_owners, num_bytes)
    SELECT o.tenant, o.audio_sha256, COUNT(*), COALESCE(MAX(f.num_bytes), 0)
    FROM (SELECT tenant, audio_sha256 FROM speaker WHERE audio_sha256 IS NOT NULL
        UNION ALL SELECT tenant, audio_sha256 FROM consent) o
    LEFT JOIN stored_file f ON f.audio_sha256 = o.audio_sha256 AND f.kind = 'audio'
    GROUP BY o.tenant, o.audio_sha256""",
    f"INSERT INTO tenant_usage (tenant, num_voices, num_consents, audio_bytes) {_SUMS}",
)

# Of what differs, so much is named.
_MAX_NAMED = 10


def is_owned(db: Connection, audio_sha256: str) -> bool:
    """Whether somebody has this audio."""
    return any(
        _all(db, select(column).where(column == audio_sha256).limit(1))
        for column in _COLUMNS
    )


def owned(db: Connection, audio_sha256s: Sequence[str]) -> set[str]:
    """Those of the addresses that somebody has."""
    return {
        sha
        for some in slices(audio_sha256s)
        for column in _COLUMNS
        for sha in _all(db, select(column).where(column.in_(some)))
    }


def audio_between(db: Connection, first: str, last: str) -> set[str]:
    """The addresses that somebody has, from ``first`` to before ``last``."""
    return {
        sha
        for column in _COLUMNS
        for sha in _all(db, select(column).where(column >= first, column < last))
    }


def audio_prefixes(db: Connection) -> set[str]:
    """The first two digits of the addresses that somebody has."""
    return {
        prefix
        for column in _COLUMNS
        for prefix in _all(
            db, select(func.substr(column, 1, 2)).where(column.is_not(None)).distinct()
        )
    }


def _all(db: Connection, query: "Select[Any]") -> Sequence[str]:
    return db.execute(query).scalars().all()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """What one tenant has.

    Attributes:
        audio_bytes: Of reference audio and consent recordings; a clip that it has
            more than once counts once.
    """

    num_voices: int = 0
    num_consents: int = 0
    audio_bytes: int = 0


def of_tenant(db: Connection, tenant: str) -> TenantUsage:
    """What a tenant has; reads one row."""
    query = select(*_COUNTS).where(tenant_usage.c.tenant == tenant)
    row = db.execute(query).first()
    return TenantUsage() if row is None else _usage(row)


def of_all(db: Connection) -> dict[str, TenantUsage]:
    """What each tenant has; reads as many rows as there are tenants."""
    rows = db.execute(select(tenant_usage.c.tenant, *_COUNTS))
    return {tenant: _usage(counts) for tenant, *counts in rows}


def num_voices(db: Connection) -> int:
    """How many voices all tenants have together."""
    total = db.execute(select(func.sum(tenant_usage.c.num_voices))).scalar()
    return int(total or 0)


def count(
    db: Connection,
    tenant: str,
    *,
    voices: int = 0,
    consents: int = 0,
    audio_bytes: int = 0,
) -> None:
    """Count so many more, or less."""
    more = dict(zip(_NAMES, (voices, consents, audio_bytes), strict=True))
    where = tenant_usage.c.tenant == tenant
    values = {name: tenant_usage.c[name] + number for name, number in more.items()}
    if db.execute(tenant_usage.update().where(where).values(values)).rowcount == 0:
        db.execute(tenant_usage.insert(), {"tenant": tenant, **more})


def own(db: Connection, tenant: str, audio_sha256: str, num_bytes: int) -> None:
    """One more voice or recording of the tenant's is of this audio."""
    where = _is_of(tenant, audio_sha256)
    values = {"num_owners": tenant_audio.c.num_owners + 1}
    if db.execute(tenant_audio.update().where(*where).values(values)).rowcount == 0:
        row = {"tenant": tenant, "audio_sha256": audio_sha256, "num_owners": 1}
        db.execute(tenant_audio.insert(), row | {"num_bytes": num_bytes})
        count(db, tenant, audio_bytes=num_bytes)


def disown(db: Connection, tenant: str, audio_sha256: str) -> None:
    """One less is; with the last one its bytes count no longer."""
    where = _is_of(tenant, audio_sha256)
    values = {"num_owners": tenant_audio.c.num_owners - 1}
    db.execute(tenant_audio.update().where(*where).values(values))
    columns = tenant_audio.c.num_owners, tenant_audio.c.num_bytes
    row = db.execute(select(*columns).where(*where)).first()
    if row is not None and row[0] <= 0:
        db.execute(tenant_audio.delete().where(*where))
        count(db, tenant, audio_bytes=-row[1])


def problems(db: Connection) -> list[str]:
    """Where they differ from the rows that they add up; reads all of those."""
    kept = of_all(db)
    counted = {tenant: _usage(sums) for tenant, *sums in db.execute(text(_SUMS))}
    found = [
        f"usage of tenant {tenant}: {kept.get(tenant)}, the rows say "
        f"{counted.get(tenant)}"
        for tenant in sorted(kept.keys() | counted.keys())
        if kept.get(tenant, TenantUsage()) != counted.get(tenant, TenantUsage())
    ]
    return found + [
        f"audio {sha}: how often tenant {tenant} has it, the rows say otherwise"
        for tenant, sha in _differing_audio(db)
    ]


def recount(db: Connection) -> None:
    """Make them say what the rows add up to."""
    for statement in (*_EMPTY, *_FILL):
        db.execute(text(statement))


def _differing_audio(db: Connection) -> list[tuple[str, str]]:
    owners = union_all(
        select(speaker.c.tenant, speaker.c.audio_sha256).where(
            speaker.c.audio_sha256.is_not(None)
        ),
        select(consent.c.tenant, consent.c.audio_sha256),
    ).subquery()
    key = owners.c.tenant, owners.c.audio_sha256
    counted = select(*key, func.count()).group_by(*key)
    columns = tenant_audio.c
    kept = select(columns.tenant, columns.audio_sha256, columns.num_owners)
    found: set[tuple[str, str]] = set()
    for query in (except_(kept, counted), except_(counted, kept)):
        rows = db.execute(query.limit(_MAX_NAMED))
        found.update((tenant, sha) for tenant, sha, _ in rows)
    return sorted(found)


def _is_of(
    tenant: str, audio_sha256: str
) -> "tuple[ColumnElement[bool], ColumnElement[bool]]":
    columns = tenant_audio.c
    return columns.tenant == tenant, columns.audio_sha256 == audio_sha256


def _usage(counts: Sequence[int]) -> TenantUsage:
    return TenantUsage(**dict(zip(_NAMES, counts, strict=True)))
