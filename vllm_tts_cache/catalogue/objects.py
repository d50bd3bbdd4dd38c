"""Loose objects of a bucket: those without a stored file, before it or after it.

An object's name is random and used once. Its row is inserted before the object is made,
and again when its file's row is deleted: so the catalogue knows every object that the
bucket holds, and none that is to be removed is forgotten. An announced object that no
file claims within an hour, less `LATE_SECONDS`, is removed.
"""

import re
import secrets

from sqlalchemy import Connection, exists, select
from sqlalchemy.dialects.postgresql import insert

from vllm_tts_cache.catalogue.leases import NOW
from vllm_tts_cache.catalogue.schema import loose_object, stored_file

FOLDER = "objects"
MAKING_SECONDS = 3600.0
# Every server removes what is to be removed within some seconds.
OVERDUE_SECONDS = 300.0
# An upload that the bucket did not acknowledge arrives within so long, or never.
LATE_SECONDS = 120.0
NAME = re.compile(rf"{FOLDER}/([0-9a-f]{{2}})/\1[0-9a-f]{{62}}/[0-9a-f]{{32}}")

_NAMES = select(loose_object.c.object_name)
_IS_BEING_MADE = loose_object.c.removable_from > NOW + LATE_SECONDS
# A stored file may have it, if the process that made it lost the answer of its commit.
_HAS_FILE = exists().where(
    stored_file.c.audio_sha256 == loose_object.c.audio_sha256,
    stored_file.c.object_name == loose_object.c.object_name,
)


def new_name(audio_sha256: str) -> str:
    """Return a name that no object has or had."""
    folder = f"{FOLDER}/{audio_sha256[:2]}/{audio_sha256}"
    return f"{folder}/{secrets.token_hex(16)}"


def announce(db: Connection, object_name: str, audio_sha256: str) -> None:
    """Insert the row of an object that is about to be made."""
    row = {"object_name": object_name, "audio_sha256": audio_sha256}
    db.execute(loose_object.insert().values(**row, removable_from=NOW + MAKING_SECONDS))


def claim(db: Connection, object_name: str) -> bool:
    """Take an announced object for a stored file, in the file's transaction.

    False if it took too long, or its audio was deleted meanwhile: it is removed.
    """
    where = loose_object.c.object_name == object_name, _IS_BEING_MADE
    return db.execute(loose_object.delete().where(*where)).rowcount == 1


def release(
    db: Connection, object_name: str, audio_sha256: str, *, is_late: bool = False
) -> None:
    """Have an object removed: now, or, if it may arrive late, after `LATE_SECONDS`."""
    row = {"object_name": object_name, "audio_sha256": audio_sha256}
    time = {"removable_from": NOW + LATE_SECONDS if is_late else NOW}
    loose = insert(loose_object).values(**row, **time)
    same = [loose_object.c.object_name]
    db.execute(loose.on_conflict_do_update(index_elements=same, set_=time))


def release_announced(db: Connection, object_name: str) -> None:
    """Have an announced object removed, unless a stored file has it.

    Its row is inserted again if it is missing: a deletion of the audio may have removed
    the row before the object arrived.
    """
    audio_sha256 = object_name.split("/")[2]
    file = stored_file.c
    where = file.audio_sha256 == audio_sha256, file.object_name == object_name
    if db.execute(select(file.id).where(*where)).first() is None:
        release(db, object_name, audio_sha256)


def release_audio(db: Connection, audio_sha256: str) -> None:
    """Have every object of an audio removed that is being made: none can be claimed.

    An object that may arrive late cannot be claimed either; its time stays.
    """
    where = loose_object.c.audio_sha256 == audio_sha256, _IS_BEING_MADE
    db.execute(loose_object.update().where(*where).values(removable_from=NOW))


def take_removable(
    db: Connection, limit: int, audio_sha256: str | None = None
) -> list[str]:
    """Return names of up to ``limit`` objects to remove, of one audio or of all.

    None can be claimed. A transaction that just claims one is waited for and keeps it.
    """
    due = _NAMES.where(loose_object.c.removable_from <= NOW, ~_HAS_FILE)
    if audio_sha256 is not None:
        due = due.where(loose_object.c.audio_sha256 == audio_sha256)
    due = due.order_by(loose_object.c.removable_from).limit(limit)
    # Checked again by the update: the row of one claimed meanwhile is not there.
    where = loose_object.c.object_name.in_(due), loose_object.c.removable_from <= NOW
    same = {"removable_from": loose_object.c.removable_from}
    taken = loose_object.update().where(*where).values(**same)
    return list(db.execute(taken.returning(loose_object.c.object_name)).scalars())


def delete_rows(db: Connection, object_names: list[str]) -> None:
    """Delete the rows of objects that are gone."""
    where = loose_object.c.object_name.in_(object_names)
    db.execute(loose_object.delete().where(where))


def names(db: Connection) -> set[str]:
    """Return the names of all loose objects."""
    return set(db.execute(_NAMES).scalars())


def overdue(db: Connection) -> list[str]:
    """Return names of objects that should have been removed long ago, sorted."""
    overdue_from = NOW - OVERDUE_SECONDS
    due = _NAMES.where(loose_object.c.removable_from <= overdue_from, ~_HAS_FILE)
    return list(db.execute(due.order_by(loose_object.c.object_name)).scalars())
