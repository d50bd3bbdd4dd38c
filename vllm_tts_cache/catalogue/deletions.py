"""Rows of deletions, and of the participants that have still to confirm them.

A deletion is finished when its files are removed and every participant has confirmed
that it deleted the audio from memory. A finished one keeps the hash of the name and the
public id, until a DELETE has reported its end or a day has passed since the request.
"""

import hashlib
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    bindparam,
    case,
    exists,
    func,
    literal,
    select,
)

from vllm_tts_cache.catalogue import leases
from vllm_tts_cache.catalogue.names import fold
from vllm_tts_cache.catalogue.schema import (
    confirmation,
    deletion,
    imported_file,
    is_postgres,
    now,
    participant,
)
from vllm_tts_cache.tenants import DEFAULT_TENANT

KEPT_SECONDS = 24 * 3600.0
# Prefix of the recorded name of a removed file of stock's; a hash follows.
_REMOVED = "removed:"
_FILE = imported_file.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """One deletion of a voice or consent recording, or of a replaced voice's audio.

    Attributes:
        audio_sha256: The audio to delete with all its encodings; its files stay if
            others own it. None without audio, or if the deletion is finished.
        public_id: Id of the voice or consent recording; None for a voice that was
            replaced or changed.
    """

    id: int
    audio_sha256: str | None
    public_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionProgress(Deletion):
    """How far a deletion is: ``waiting_for`` participants have not confirmed it yet."""

    files_removed: bool
    waiting_for: int

    @property
    def is_finished(self) -> bool:
        """Whether its files are removed and every participant has confirmed."""
        return self.files_removed and self.waiting_for == 0


def _name_hash(tenant: str, name_key: str) -> str:
    """Return the hex SHA-256 that is kept of a deleted voice's name."""
    return hashlib.sha256(f"{tenant}\0{name_key}".encode()).hexdigest()


_ASKED = ["participant_id", "deletion_id"]
_COLUMNS = deletion.c.id, deletion.c.audio_sha256, deletion.c.public_id
# All confirmations count: participants without a lease confirm on their return.
_IS_OVER = (
    deletion.c.files_removed == 1,
    ~exists().where(confirmation.c.deletion_id == deletion.c.id),
)
# Run several times a second; an empty index nearly always answers it.
_TO_CONFIRM = (
    select(*_COLUMNS)
    .join_from(confirmation, deletion, confirmation.c.deletion_id == deletion.c.id)
    .where(
        confirmation.c.participant_id == bindparam("participant"),
        deletion.c.files_removed == 1,
    )
    .order_by(deletion.c.public_id.is_(None), deletion.c.id)
    .limit(256)  # at a time, however many wait
)


def add(
    db: Connection,
    audio_sha256: str | None,
    *,
    tenant: str,
    name_key: str | None = None,
    public_id: str | None = None,
) -> Deletion:
    """Insert a deletion, which every participant has to confirm.

    Without an audio no participant has to, except on PostgreSQL: while that is down,
    API servers answer requests by the last row that they read. A repeated DELETE finds
    the row by ``name_key`` or ``public_id``, and not if both are None.
    """
    row = {
        "audio_sha256": audio_sha256,
        "name_hash": None if name_key is None else _name_hash(tenant, name_key),
        "public_id": public_id,
        "tenant": tenant,
        "requested_at": now(db),
        "files_removed": 0,
    }
    insert = deletion.insert().values(**row).returning(deletion.c.id)
    number: int = db.execute(insert).scalar_one()
    if audio_sha256 is not None or is_postgres(db):
        asked = select(participant.c.id, literal(number, BigInteger))
        db.execute(confirmation.insert().from_select(_ASKED, asked))
    return Deletion(id=number, audio_sha256=audio_sha256, public_id=public_id)


def get(db: Connection, deletion_id: int) -> DeletionProgress | None:
    """Return the progress of a deletion; None if its row was deleted."""
    return next(iter(_progress(db, deletion.c.id == deletion_id)), None)


def of_name(db: Connection, tenant: str, name: str) -> DeletionProgress | None:
    """Return the progress of a name's or id's first unfinished, or last, deletion."""
    found = _progress(db, _is_of(tenant, name))
    unfinished = (progress for progress in found if not progress.is_finished)
    return next(unfinished, found[-1] if found else None)


def unfinished(db: Connection, limit: int | None = None) -> list[Deletion]:
    """Return deletions whose files are not all removed, the oldest first.

    They are running, or were interrupted.
    """
    query = select(*_COLUMNS).where(deletion.c.files_removed == 0)
    rows = db.execute(query.order_by(deletion.c.id).limit(limit))
    return [Deletion(**row) for row in rows.mappings()]


def num_unfinished(db: Connection, tenant: str | None = None) -> int:
    """Count the deletions of a tenant, or of all, with files or confirmations left."""
    waiting = _awaited(db, select(confirmation.c.deletion_id))
    is_open = (deletion.c.files_removed == 0) | deletion.c.id.in_(waiting)
    query = select(func.count(deletion.c.id)).where(is_open)
    if tenant is not None:
        query = query.where(deletion.c.tenant == tenant)
    return db.execute(query).scalar_one()


def to_confirm(db: Connection, participant_id: str) -> list[Deletion]:
    """Return deletions without files to be confirmed: deleted voices, then replaced."""
    rows = db.execute(_TO_CONFIRM, {"participant": participant_id})
    return [Deletion(**row) for row in rows.mappings()]


def confirm(db: Connection, deletion_id: int, participant_id: str) -> None:
    """Record that a participant has deleted the audio from memory."""
    is_it = confirmation.c.deletion_id == deletion_id
    is_its = confirmation.c.participant_id == participant_id
    db.execute(confirmation.delete().where(is_it, is_its))
    _finish(db, deletion_id)


def files_are_removed(db: Connection, deletion_id: int) -> None:
    """Record that all files of a deletion are removed."""
    where = deletion.c.id == deletion_id
    db.execute(deletion.update().where(where).values(files_removed=1))
    _finish(db, deletion_id)


def acknowledge(db: Connection, deletion_id: int) -> None:
    """Delete the row of a deletion, if it is finished."""
    if (found := get(db, deletion_id)) is not None and found.is_finished:
        change = deletion.update().where(deletion.c.id == deletion_id)
        db.execute(change.values(name_hash=None, public_id=None))
        _finish(db, deletion_id)


def delete_old(db: Connection) -> None:
    """Delete the rows of finished deletions that were requested over a day ago."""
    is_old = deletion.c.requested_at < now(db) - KEPT_SECONDS
    db.execute(deletion.delete().where(*_IS_OVER, is_old))


def delete_finished(db: Connection, tenant: str, name: str) -> None:
    """Delete the rows of a name's finished deletions, before another one begins."""
    for progress in _progress(db, _is_of(tenant, name)):
        acknowledge(db, progress.id)


def join(db: Connection, participant_id: str) -> None:
    """Insert a participant, which has to confirm every deletion from now on."""
    db.execute(participant.insert(), {"id": participant_id, "joined_at": now(db)})


def ask_of_unfinished(db: Connection, participant_id: str) -> None:
    """Have a participant that has just joined confirm deletions with files left.

    Until these files are removed, it may read them into memory.
    """
    has_files = (deletion.c.files_removed == 0) & deletion.c.audio_sha256.is_not(None)
    asked = select(literal(participant_id), deletion.c.id).where(has_files)
    db.execute(confirmation.insert().from_select(_ASKED, asked))


def leave(db: Connection, participant_id: str) -> None:
    """Delete a participant; deletions do not wait for it any more."""
    is_its = confirmation.c.participant_id == participant_id
    asked = list(db.execute(select(confirmation.c.deletion_id).where(is_its)).scalars())
    db.execute(confirmation.delete().where(is_its))
    db.execute(participant.delete().where(participant.c.id == participant_id))
    for deletion_id in asked:
        _finish(db, deletion_id)


def participants(db: Connection) -> list[str]:
    """Return the ids of participants that have not left; some may be dead."""
    return list(db.execute(select(participant.c.id)).scalars())


# --- Files of stock vLLM-Omni whose voices were imported: deletions remove them.


def stock_name_hash(name_key: str) -> str:
    """Return what a stock file's row has in the place of a deleted voice's name."""
    return f"sha256:{_name_hash(DEFAULT_TENANT, name_key)}"


def has_stock_files(db: Connection, name_key: str) -> bool:
    """Whether files of stock's hold a voice of this name that was not deleted."""
    query = select(1).where(_FILE.name_key == name_key, _FILE.deleted_at.is_(None))
    return db.execute(query.limit(1)).first() is not None


def add_stock_files(db: Connection, name_key: str, deletion_id: int) -> None:
    """Let a voice's deletion remove stock's files of it, and hash its name there.

    The rows stay and say that it was deleted: a copy of such a file does not bring the
    voice back.
    """
    requested_at, created_at = time.time(), _FILE.created_at
    values = {
        "name_key": stock_name_hash(name_key),
        # Stock dates a voice up to some seconds ahead of the clock.
        "deleted_at": case((created_at > requested_at, created_at), else_=requested_at),
        "deletion_id": deletion_id,
    }
    is_present = _FILE.file_name.not_like(f"{_REMOVED}%")
    names = _FILE.name_key.in_([name_key, stock_name_hash(name_key)])
    db.execute(imported_file.update().where(names, is_present).values(**values))


def rename_stock_files(db: Connection, old_name_key: str, name_key: str) -> None:
    """Record a voice's new name for its files, so that they are deleted with it.

    The import does not read them again: they have a row.
    """
    where = _FILE.name_key == old_name_key, _FILE.deleted_at.is_(None)
    db.execute(imported_file.update().where(*where).values(name_key=name_key))


def stock_files(db: Connection, deletion_id: int) -> list[tuple[str, int, int]]:
    """Return name, mtime in ns and size of stock's files that a deletion removes."""
    columns = select(_FILE.file_name, _FILE.mtime_ns, _FILE.size)
    rows = db.execute(columns.where(_FILE.deletion_id == deletion_id))
    return [(name, mtime_ns, size) for name, mtime_ns, size in rows]


def stock_file_is_removed(db: Connection, file_name: str) -> None:
    """Replace a removed file's name, which contains the voice's, by a hash."""
    hashed = f"{_REMOVED}{hashlib.sha256(file_name.encode()).hexdigest()}"
    db.execute(imported_file.delete().where(_FILE.file_name == hashed))
    where = _FILE.file_name == file_name
    values = {"file_name": hashed, "deletion_id": None}
    db.execute(imported_file.update().where(where).values(**values))


def _finish(db: Connection, deletion_id: int) -> None:
    """Clear a finished deletion's audio; delete its row if no DELETE can find it."""
    is_over = *_IS_OVER, deletion.c.id == deletion_id
    db.execute(deletion.update().where(*is_over).values(audio_sha256=None))
    is_asked_for = deletion.c.name_hash.is_not(None) | deletion.c.public_id.is_not(None)
    db.execute(deletion.delete().where(*is_over, ~is_asked_for))


def _awaited(db: Connection, query: "Select[Any]") -> "Select[Any]":
    """Limit a query to confirmations of participants that are waited for."""
    if not is_postgres(db):  # with locks, dead participants were deleted
        return query
    return leases.awaited(query, confirmation.c.participant_id)


def _is_of(tenant: str, name: str) -> "ColumnElement[bool]":
    by_name = deletion.c.name_hash == _name_hash(tenant, fold(name))
    is_tenants = deletion.c.tenant == tenant
    return by_name | ((deletion.c.public_id == name.strip()) & is_tenants)


def _progress(db: Connection, where: "ColumnElement[bool]") -> list[DeletionProgress]:
    is_of_row = confirmation.c.deletion_id == deletion.c.id
    waiting = _awaited(db, select(func.count(confirmation.c.participant_id)))
    num_waiting = waiting.where(is_of_row).correlate(deletion).scalar_subquery()
    is_removed = (deletion.c.files_removed == 1).label("files_removed")
    query = select(*_COLUMNS, is_removed, num_waiting.label("waiting_for"))
    rows = db.execute(query.where(where).order_by(deletion.c.id))
    return [DeletionProgress(**row) for row in rows.mappings()]
