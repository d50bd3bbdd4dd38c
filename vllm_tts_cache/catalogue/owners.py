"""Whose an audio is: a speaker's or a consent recording's, of whatever tenant."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Select, func, select

from vllm_tts_cache.catalogue.schema import consent, slices, speaker

_COLUMNS = speaker.c.audio_sha256, consent.c.audio_sha256


def is_owned(db: Connection, audio_sha256: str) -> bool:
    """Whether somebody has this audio."""
    return bool(owned(db, [audio_sha256]))


def owned(db: Connection, audio_sha256s: Sequence[str]) -> set[str]:
    """Those of the addresses that somebody has."""
    return {
        sha
        for some in slices(audio_sha256s)
        for column in _COLUMNS
        for sha in _all(db, select(column).where(column.in_(some)))
    }


def tenants_of(db: Connection, audio_sha256: str) -> set[str]:
    """The tenants that have this audio."""
    return {
        tenant
        for table in (speaker, consent)
        for tenant in _all(
            db,
            select(table.c.tenant)
            .where(table.c.audio_sha256 == audio_sha256)
            .distinct(),
        )
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
            db,
            select(func.substr(column, 1, 2)).where(column.is_not(None)).distinct(),
        )
    }


def _all(db: Connection, query: "Select[Any]") -> Sequence[str]:
    return db.execute(query).scalars().all()
