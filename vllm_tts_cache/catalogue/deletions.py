"""Deletions that are not finished, and who has still to take part in them.

A deletion is finished when its files are gone and every participant has confirmed
that it remembers nothing. Of a finished one only the hash of the name stays, until
somebody was told or a day has passed.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    bindparam,
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
    is_postgres,
    now,
    participant,
)

KEPT_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """What is being deleted.

    Attributes:
        id: Its number.
        audio_sha256: The audio that goes with all its encodings, unless others have
            it as well; None if there is none, or if the deletion is finished.
        public_id: Of the voice or consent recording; None for what was replaced.
    """

    id: int
    audio_sha256: str | None
    public_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionProgress:
    """How far a deletion is.

    Attributes:
        files_removed: Whether nothing of it is left on disk.
        waiting_for: Participants that have not confirmed.
    """

    deletion: Deletion
    files_removed: bool
    waiting_for: int

    @property
    def is_finished(self) -> bool:
        """Whether nothing of the voice is left anywhere."""
        return self.files_removed and self.waiting_for == 0


def name_hash(tenant: str, name_key: str) -> str:
    """What is kept of a deleted voice's name."""
    return hashlib.sha256(f"{tenant}\0{name_key}".encode()).hexdigest()


_COLUMNS = deletion.c.id, deletion.c.audio_sha256, deletion.c.public_id
# Asked several times a second, and nearly always answered by an empty index.
_TO_CONFIRM = (
    select(*_COLUMNS)
    .join_from(confirmation, deletion, confirmation.c.deletion_id == deletion.c.id)
    .where(
        confirmation.c.participant_id == bindparam("participant"),
        deletion.c.files_removed == 1,
    )
    .order_by(deletion.c.id)
)


def add(
    db: Connection,
    audio_sha256: str | None,
    *,
    tenant: str,
    hashed: str | None = None,
    public_id: str | None = None,
) -> Deletion:
    """Write down a deletion, for every participant to confirm.

    Without an audio nobody remembers anything, and nobody is asked, unless API servers
    speak by the last row that they read while the catalogue is away. A DELETE that is
    repeated asks by the hashed name or the public id; without both nobody asks.
    """
    row = {
        "audio_sha256": audio_sha256,
        "name_hash": hashed,
        "public_id": public_id,
        "tenant": tenant,
        "requested_at": now(db),
        "files_removed": 0,
    }
    insert = deletion.insert().values(**row).returning(deletion.c.id)
    number: int = db.execute(insert).scalar_one()
    if audio_sha256 is not None or is_postgres(db):
        asked = [
            {"deletion_id": number, "participant_id": id_}
            for id_ in db.execute(select(participant.c.id)).scalars()
        ]
        if asked:
            db.execute(confirmation.insert(), asked)
    return Deletion(id=number, audio_sha256=audio_sha256, public_id=public_id)


def get(db: Connection, deletion_id: int) -> DeletionProgress | None:
    """How far one deletion is; None if nothing is known of it any more."""
    return next(iter(_progress(db, deletion.c.id == deletion_id)), None)


def of_name(db: Connection, tenant: str, name: str) -> DeletionProgress | None:
    """How far the deletion of a name or id is: the first that goes on, or the last."""
    found = _progress(db, _is_of(tenant, name))
    unfinished = (progress for progress in found if not progress.is_finished)
    return next(unfinished, found[-1] if found else None)


def unfinished(db: Connection) -> list[Deletion]:
    """Those whose files are not all gone, oldest first."""
    query = select(*_COLUMNS).where(deletion.c.files_removed == 0)
    rows = db.execute(query.order_by(deletion.c.id))
    return [Deletion(**row) for row in rows.mappings()]


def num_unfinished(db: Connection, tenant: str | None = None) -> int:
    """How many have files left, or participants that have not confirmed.

    Of all tenants, or of one.
    """
    waiting = _awaited(db, select(confirmation.c.deletion_id))
    is_open = (deletion.c.files_removed == 0) | deletion.c.id.in_(waiting)
    query = select(func.count(deletion.c.id)).where(is_open)
    if tenant is not None:
        query = query.where(deletion.c.tenant == tenant)
    return db.execute(query).scalar_one()


def to_confirm(db: Connection, participant_id: str) -> list[Deletion]:
    """Those without files that the participant has not confirmed, oldest first."""
    rows = db.execute(_TO_CONFIRM, {"participant": participant_id})
    return [Deletion(**row) for row in rows.mappings()]


def confirm(db: Connection, deletion_id: int, participant_id: str) -> None:
    """The participant remembers nothing of it any more."""
    db.execute(
        confirmation.delete().where(
            confirmation.c.deletion_id == deletion_id,
            confirmation.c.participant_id == participant_id,
        )
    )
    _finish(db, deletion_id)


def files_are_removed(db: Connection, deletion_id: int) -> None:
    """Nothing of it is left on disk."""
    where = deletion.c.id == deletion_id
    db.execute(deletion.update().where(where).values(files_removed=1))
    _finish(db, deletion_id)


def acknowledge(db: Connection, deletion_id: int) -> None:
    """Delete the row of a deletion, if it is finished."""
    found = get(db, deletion_id)
    if found is None or not found.is_finished:
        return
    where = deletion.c.id == deletion_id
    db.execute(deletion.update().where(where).values(name_hash=None, public_id=None))
    _finish(db, deletion_id)


def delete_old(db: Connection) -> None:
    """Delete the rows of finished deletions of which nobody was told for a day."""
    waiting = select(confirmation.c.deletion_id)
    db.execute(
        deletion.delete().where(
            deletion.c.files_removed == 1,
            deletion.c.id.not_in(waiting),
            deletion.c.requested_at < now(db) - KEPT_SECONDS,
        )
    )


def delete_finished(db: Connection, tenant: str, name: str) -> None:
    """Delete the rows of finished deletions of a name: another one begins."""
    for progress in _progress(db, _is_of(tenant, name)):
        acknowledge(db, progress.deletion.id)


def join(db: Connection, participant_id: str) -> None:
    """Ask the participant about every deletion from now on."""
    db.execute(participant.insert(), {"id": participant_id, "joined_at": now(db)})


def ask_of_unfinished(db: Connection, participant_id: str) -> None:
    """Ask a participant that has just joined about those whose files are still there.

    Until they are gone it may read them, and remember what it read.
    """
    has_files = (deletion.c.files_removed == 0) & deletion.c.audio_sha256.is_not(None)
    asked = select(literal(participant_id), deletion.c.id).where(has_files)
    columns = [confirmation.c.participant_id, confirmation.c.deletion_id]
    db.execute(confirmation.insert().from_select(columns, asked))


def leave(db: Connection, participant_id: str) -> None:
    """Ask the participant nothing any more."""
    of_it = confirmation.c.participant_id == participant_id
    asked = list(db.execute(select(confirmation.c.deletion_id).where(of_it)).scalars())
    db.execute(confirmation.delete().where(of_it))
    db.execute(participant.delete().where(participant.c.id == participant_id))
    for deletion_id in asked:
        _finish(db, deletion_id)


def participants(db: Connection) -> list[str]:
    """All that have joined and not left; some may be dead."""
    return list(db.execute(select(participant.c.id)).scalars())


def _finish(db: Connection, deletion_id: int) -> None:
    """If nothing is left to do, keep no more than the hash of the name."""
    # Those that are waited for no longer are asked when they come back.
    asked = exists().where(confirmation.c.deletion_id == deletion.c.id)
    is_over = deletion.c.files_removed == 1, ~asked, deletion.c.id == deletion_id
    db.execute(deletion.update().where(*is_over).values(audio_sha256=None))
    is_asked_for = deletion.c.name_hash.is_not(None) | deletion.c.public_id.is_not(None)
    db.execute(deletion.delete().where(*is_over, ~is_asked_for))


def _awaited(db: Connection, query: "Select[Any]") -> "Select[Any]":
    """Of confirmations, those that somebody is waited for; see `leases`."""
    if not is_postgres(db):  # by locks: whoever is dead was removed
        return query
    return leases.awaited(query, confirmation.c.participant_id)


def _is_of(tenant: str, name: str) -> "ColumnElement[bool]":
    by_name = deletion.c.name_hash == name_hash(tenant, fold(name))
    is_tenants = deletion.c.tenant == tenant
    return by_name | ((deletion.c.public_id == name) & is_tenants)


def _progress(db: Connection, where: "ColumnElement[bool]") -> list[DeletionProgress]:
    of_it = confirmation.c.deletion_id == deletion.c.id
    waiting = _awaited(db, select(func.count(confirmation.c.participant_id)))
    num_waiting = waiting.where(of_it).correlate(deletion).scalar_subquery()
    query = select(*_COLUMNS, deletion.c.files_removed, num_waiting).where(where)
    rows: Sequence[Any] = db.execute(query.order_by(deletion.c.id)).all()
    return [
        DeletionProgress(
            deletion=Deletion(id=number, audio_sha256=sha, public_id=public_id),
            files_removed=bool(files_removed),
            waiting_for=num_waiting_for,
        )
        for number, sha, public_id, files_removed, num_waiting_for in rows
    ]
