"""Rows of ``tenant_encoding``: what a tenant may be told of encodings that all share.

An encoding is stored by its content, for whomever; that it is there may say that
somebody else has the same clip. So a tenant is told of those alone that it has waited
for itself. The caller has the transaction.
"""

from collections.abc import Iterable

from sqlalchemy import ColumnElement, Connection, literal, select

from vllm_tts_cache.catalogue import owners
from vllm_tts_cache.catalogue.record import AUDIO_KIND, Segment
from vllm_tts_cache.catalogue.schema import speaker, stored_file, tenant_encoding
from vllm_tts_cache.catalogue.stored_files import IS_NO_PREVIEW

_ASKED, _TOLD = 0, 1


def told(db: Connection, tenant: str, audio_sha256: str) -> frozenset[str]:
    """The kinds that are stored, and that the tenant was told of."""
    query = select(tenant_encoding.c.kind).join(
        stored_file,
        (stored_file.c.audio_sha256 == tenant_encoding.c.audio_sha256)
        & (stored_file.c.kind == tenant_encoding.c.kind),
    )
    where = (*_is_of(tenant, audio_sha256), tenant_encoding.c.is_told == _TOLD)
    return frozenset(db.execute(query.where(*where)).scalars())


def asked(db: Connection, tenant: str, audio_sha256: str) -> frozenset[str]:
    """The kinds that the tenant has asked for, whatever came of it."""
    query = select(tenant_encoding.c.kind).where(*_is_of(tenant, audio_sha256))
    return frozenset(db.execute(query).scalars())


def ask(
    db: Connection,
    tenant: str,
    audio_sha256: str,
    kinds: Iterable[str],
    segment: Segment = Segment.INLINE,
) -> None:
    """The tenant asks for these: from now on it may be told how far they are.

    ``segment`` is registered if it asks as of a voice of its own.
    """
    if _is_there(db, tenant, audio_sha256, segment):
        known = asked(db, tenant, audio_sha256)
        _insert(db, tenant, audio_sha256, set(kinds) - known, _ASKED)


def tell(
    db: Connection,
    tenant: str,
    audio_sha256: str,
    kinds: Iterable[str],
    segment: Segment = Segment.INLINE,
) -> None:
    """The tenant is told that these are there; ``segment`` as of `ask`."""
    if not _is_there(db, tenant, audio_sha256, segment):
        return  # nothing would remove the rows
    where = _is_of(tenant, audio_sha256)
    new = set(kinds)
    is_new = tenant_encoding.c.kind.in_(new)
    db.execute(tenant_encoding.update().where(*where, is_new).values(is_told=_TOLD))
    known = asked(db, tenant, audio_sha256)
    _insert(db, tenant, audio_sha256, new - known, _TOLD)


def delete(db: Connection, tenant: str, audio_sha256: str) -> None:
    """The tenant has nothing of this audio any more."""
    db.execute(tenant_encoding.delete().where(*_is_of(tenant, audio_sha256)))


def take_in(db: Connection, tenant: str) -> None:
    """Tell a tenant all that is stored of its voices, if it was told nothing yet.

    For voices of a time when there was one tenant: whatever is stored is its own.
    """
    first = select(tenant_encoding.c.kind).where(tenant_encoding.c.tenant == tenant)
    if db.execute(first.limit(1)).first() is not None:
        return
    kinds = (
        select(
            stored_file.c.audio_sha256,
            stored_file.c.kind,
            literal(tenant),
            literal(_TOLD),
        )
        .join(speaker, speaker.c.audio_sha256 == stored_file.c.audio_sha256)
        .where(
            speaker.c.tenant == tenant,
            stored_file.c.kind != AUDIO_KIND,
            IS_NO_PREVIEW,
        )
        .distinct()
    )
    columns = ["audio_sha256", "kind", "tenant", "is_told"]
    db.execute(tenant_encoding.insert().from_select(columns, kinds))


def _insert(
    db: Connection, tenant: str, audio_sha256: str, kinds: Iterable[str], is_told: int
) -> None:
    row = {"tenant": tenant, "audio_sha256": audio_sha256, "is_told": is_told}
    if rows := [{**row, "kind": kind} for kind in sorted(kinds)]:
        db.execute(tenant_encoding.insert(), rows)


def _is_there(db: Connection, tenant: str, audio_sha256: str, segment: Segment) -> bool:
    """Whether the audio is stored, and of a voice the tenant still has one."""
    is_voices = segment is Segment.REGISTERED
    if is_voices and tenant not in owners.tenants_of(db, audio_sha256):
        return False  # others have it
    where = stored_file.c.audio_sha256 == audio_sha256, stored_file.c.kind == AUDIO_KIND
    return db.execute(select(stored_file.c.id).where(*where)).first() is not None


def _is_of(
    tenant: str, audio_sha256: str
) -> "tuple[ColumnElement[bool], ColumnElement[bool]]":
    columns = tenant_encoding.c
    return columns.audio_sha256 == audio_sha256, columns.tenant == tenant
