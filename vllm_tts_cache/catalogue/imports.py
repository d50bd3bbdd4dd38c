"""Rows of the table ``imported_file``: what is known about stock's voice files."""

import hashlib
import time
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, case, func, select

from vllm_tts_cache.catalogue import deletions
from vllm_tts_cache.catalogue.record import DEFAULT_TENANT
from vllm_tts_cache.catalogue.schema import imported_file, speaker
from vllm_tts_cache.config import RegistrationPolicy

# Begins the name of a file that was removed, of which the rest is a hash.
_REMOVED = "removed:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedFile:
    """A file that was looked at; another time or size makes it another file.

    Attributes:
        file_name: Its name in the directory.
        mtime_ns: When its content last changed.
        size: Its length in bytes.
        name_key: Folded name of the voice in it; empty if there is none.
        created_at: When stock registered the voice, in Unix seconds.
    """

    file_name: str
    mtime_ns: int
    size: int
    name_key: str = ""
    created_at: float = 0.0


def known(db: Connection) -> dict[str, tuple[int, int]]:
    """All files that were looked at: name -> (mtime_ns, size)."""
    columns = imported_file.c
    query = select(columns.file_name, columns.mtime_ns, columns.size)
    return {name: (mtime_ns, size) for name, mtime_ns, size in db.execute(query)}


def remember(db: Connection, file: ImportedFile) -> None:
    """Insert or update the file's row; a voice that was deleted stays deleted."""
    where = imported_file.c.file_name == file.file_name
    old = db.execute(
        select(imported_file.c.name_key, imported_file.c.deleted_at).where(where)
    ).first()
    row = asdict(file)
    if old is not None and old.deleted_at is not None:
        names = file.name_key, _hashed(file.name_key)
        if old.name_key in names and file.created_at <= old.deleted_at:
            del row["name_key"]
            db.execute(imported_file.update().where(where).values(**row))
            return
    db.execute(imported_file.delete().where(where))
    db.execute(imported_file.insert(), row)


def has_files(db: Connection, name_key: str) -> bool:
    """Whether a voice of this name, that was not deleted, is in files of stock's."""
    columns = imported_file.c
    query = select(1).where(columns.name_key == name_key, columns.deleted_at.is_(None))
    return db.execute(query.limit(1)).first() is not None


def mark_deleted(db: Connection, name_key: str, deletion_id: int) -> None:
    """Leave the files of a voice to its deletion, and keep its name no longer.

    That it was deleted is remembered with the rows: a copy of such a file does not
    bring the voice back.
    """
    now, created_at = time.time(), imported_file.c.created_at
    values = {
        "name_key": _hashed(name_key),
        # Stock dates a voice up to some seconds ahead of the clock.
        "deleted_at": case((created_at > now, created_at), else_=now),
        "deletion_id": deletion_id,
    }
    is_left = imported_file.c.file_name.not_like(f"{_REMOVED}%")
    names = imported_file.c.name_key.in_([name_key, _hashed(name_key)])
    db.execute(imported_file.update().where(names, is_left).values(**values))


def rename(db: Connection, old_name_key: str, name_key: str) -> None:
    """The voice of some files is called otherwise now: they are deleted with it.

    They are not imported again either, as they were looked at.
    """
    where = (
        imported_file.c.name_key == old_name_key,
        imported_file.c.deleted_at.is_(None),
    )
    db.execute(imported_file.update().where(*where).values(name_key=name_key))


def to_remove(db: Connection, deletion_id: int) -> list[ImportedFile]:
    """Stock's files that a deletion has to remove."""
    columns = imported_file.c
    query = select(columns.file_name, columns.mtime_ns, columns.size)
    rows = db.execute(query.where(columns.deletion_id == deletion_id))
    return [
        ImportedFile(file_name=name, mtime_ns=mtime_ns, size=size)
        for name, mtime_ns, size in rows
    ]


def delete_file_name(db: Connection, file_name: str) -> None:
    """The file is gone: keep its name no longer, which has the voice's in it."""
    hashed = f"{_REMOVED}{hashlib.sha256(file_name.encode()).hexdigest()}"
    db.execute(imported_file.delete().where(imported_file.c.file_name == hashed))
    where = imported_file.c.file_name == file_name
    values = {"file_name": hashed, "deletion_id": None}
    db.execute(imported_file.update().where(where).values(**values))


def refusal(
    db: Connection, name_key: str, created_at: float, policy: RegistrationPolicy
) -> str | None:
    """Why a voice of this name and age is not imported, None if it is."""
    columns = imported_file.c
    deleted = select(func.max(columns.deleted_at))
    deleted_at = db.execute(
        deleted.where(columns.name_key.in_([name_key, _hashed(name_key)]))
    ).scalar()
    if deleted_at is not None and created_at <= deleted_at:
        return "the voice was deleted after the file was written"
    registered_at = db.execute(
        select(speaker.c.created_at).where(
            speaker.c.tenant == DEFAULT_TENANT, speaker.c.name_key == name_key
        )
    ).scalar()
    if registered_at is None:
        return None
    if registered_at >= created_at:
        return "the registered voice of this name is as new or newer"
    if policy == "immutable":
        return "the name is registered and the registration policy is 'immutable'"
    return None


def take_over(db: Connection, file: ImportedFile, deleted_at: float | None) -> None:
    """Insert a row of an earlier version, unless the file is known."""
    where = imported_file.c.file_name == file.file_name
    if db.execute(select(1).where(where)).first() is not None:
        return
    row = asdict(file) | {"deleted_at": deleted_at}
    if deleted_at is not None:
        row["name_key"] = _hashed(file.name_key)
    db.execute(imported_file.insert(), row)


def _hashed(name_key: str) -> str:
    return f"sha256:{deletions.name_hash(DEFAULT_TENANT, name_key)}"
