"""Objects of a bucket that no stored file is in: not yet, or not any more.

An object's name is random and used once. It is written down here before the object is
made and after its file is gone, so that the bucket never holds what the catalogue does
not know of, and nothing that is still to be removed is lost. Who makes an object
has an hour to commit the file that it is; then it is nobody's.
"""

import secrets

from sqlalchemy import Connection, Select, select
from sqlalchemy.dialects.postgresql import insert

from vllm_tts_cache.catalogue.leases import NOW
from vllm_tts_cache.catalogue.schema import loose_object

FOLDER = "objects"
MAKING_SECONDS = 3600.0
# Every server removes what is to be removed within some seconds.
OVERDUE_SECONDS = 300.0
_NUM_BYTES = 16

_NAMES = select(loose_object.c.object_name)


def new_name(audio_sha256: str) -> str:
    """A name that no object has or had."""
    folder = f"{FOLDER}/{audio_sha256[:2]}/{audio_sha256}"
    return f"{folder}/{secrets.token_hex(_NUM_BYTES)}"


def announce(db: Connection, object_name: str, audio_sha256: str) -> None:
    """Write down that an object is about to be made."""
    row = {"object_name": object_name, "audio_sha256": audio_sha256}
    until = NOW + MAKING_SECONDS
    db.execute(loose_object.insert().values(**row, removable_from=until))


def claim(db: Connection, object_name: str) -> bool:
    """Take an announced object for a stored file, in the file's transaction.

    False if it took too long, or its audio was deleted meanwhile: it is nobody's.
    """
    where = (
        loose_object.c.object_name == object_name,
        loose_object.c.removable_from > NOW,
    )
    return db.execute(loose_object.delete().where(*where)).rowcount == 1


def let_go(db: Connection, object_name: str, audio_sha256: str) -> None:
    """Write down that an object is nobody's any more."""
    row = {"object_name": object_name, "audio_sha256": audio_sha256}
    let = insert(loose_object).values(**row, removable_from=NOW)
    same = [loose_object.c.object_name]
    db.execute(
        let.on_conflict_do_update(index_elements=same, set_={"removable_from": NOW})
    )


def let_go_of_announced(db: Connection, object_name: str) -> None:
    """Give up an object that was announced, unless it was claimed."""
    where = loose_object.c.object_name == object_name
    db.execute(loose_object.update().where(where).values(removable_from=NOW))


def let_go_of_audio(db: Connection, audio_sha256: str) -> None:
    """Take every object of an audio that is being made from whoever makes it."""
    where = loose_object.c.audio_sha256 == audio_sha256
    db.execute(loose_object.update().where(where).values(removable_from=NOW))


def take_removable(
    db: Connection, limit: int, audio_sha256: str | None = None
) -> list[str]:
    """Name objects that are to be removed; from here on nobody can claim them.

    Who is claiming one at this moment is waited for, and keeps it.
    """
    due = _NAMES.where(loose_object.c.removable_from <= NOW)
    if audio_sha256 is not None:
        due = due.where(loose_object.c.audio_sha256 == audio_sha256)
    return _taken(db, due.order_by(loose_object.c.removable_from).limit(limit))


def removed(db: Connection, object_names: list[str]) -> None:
    """Delete the rows of objects that are gone."""
    where = loose_object.c.object_name.in_(object_names)
    db.execute(loose_object.delete().where(where))


def names(db: Connection) -> set[str]:
    """All that are written down here."""
    return set(db.execute(_NAMES).scalars())


def overdue(db: Connection) -> list[str]:
    """Those that were to be removed long ago and are not yet, in order."""
    due = _NAMES.where(loose_object.c.removable_from <= NOW - OVERDUE_SECONDS)
    return list(db.execute(due.order_by(loose_object.c.object_name)).scalars())


def _taken(db: Connection, due: "Select[tuple[str]]") -> list[str]:
    # Asked once more as it is updated: what was claimed meanwhile is not there.
    where = (
        loose_object.c.object_name.in_(due),
        loose_object.c.removable_from <= NOW,
    )
    same = {"removable_from": loose_object.c.removable_from}
    taken = loose_object.update().where(*where).values(**same)
    return list(db.execute(taken.returning(loose_object.c.object_name)).scalars())
