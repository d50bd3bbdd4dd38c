"""Objects of a bucket that no stored file is in: not yet, or not any more.

An object's name is random and used once. It is written down here before the object is
made and after its file is gone, so that the bucket never holds what the catalogue does
not know of, and nothing that is still to be removed is lost. Who makes an object
has an hour to commit the file that it is; then it is nobody's.
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
# What was sent to the bucket and not acknowledged arrives within so long, or never.
LATE_SECONDS = 120.0
_NUM_BYTES = 16
_NAME = re.compile(rf"{FOLDER}/([0-9a-f]{{2}})/\1[0-9a-f]{{62}}/[0-9a-f]{{32}}")

_NAMES = select(loose_object.c.object_name)
_IS_BEING_MADE = loose_object.c.removable_from > NOW + LATE_SECONDS
# A file may have one whose maker does not know that it was committed.
_HAS_FILE = exists().where(
    stored_file.c.audio_sha256 == loose_object.c.audio_sha256,
    stored_file.c.object_name == loose_object.c.object_name,
)


def new_name(audio_sha256: str) -> str:
    """A name that no object has or had."""
    folder = f"{FOLDER}/{audio_sha256[:2]}/{audio_sha256}"
    return f"{folder}/{secrets.token_hex(_NUM_BYTES)}"


def is_name(text: str) -> bool:
    """Whether an object of ours may be called so."""
    return _NAME.fullmatch(text) is not None


def announce(db: Connection, object_name: str, audio_sha256: str) -> None:
    """Write down that an object is about to be made."""
    row = {"object_name": object_name, "audio_sha256": audio_sha256}
    until = NOW + MAKING_SECONDS
    db.execute(loose_object.insert().values(**row, removable_from=until))


def claim(db: Connection, object_name: str) -> bool:
    """Take an announced object for a stored file, in the file's transaction.

    False if it took too long, or its audio was deleted meanwhile: it is nobody's.
    """
    where = loose_object.c.object_name == object_name, _IS_BEING_MADE
    return db.execute(loose_object.delete().where(*where)).rowcount == 1


def let_go(
    db: Connection, object_name: str, audio_sha256: str, *, is_late: bool = False
) -> None:
    """Write down that an object is nobody's any more, or may still arrive."""
    row = {"object_name": object_name, "audio_sha256": audio_sha256}
    removable_from = NOW + LATE_SECONDS if is_late else NOW
    let = insert(loose_object).values(**row, removable_from=removable_from)
    same = [loose_object.c.object_name]
    again = {"removable_from": removable_from}
    db.execute(let.on_conflict_do_update(index_elements=same, set_=again))


def let_go_of_announced(db: Connection, object_name: str) -> None:
    """Give up an object that was announced, unless a file has it.

    It is written down anew: a deletion of its audio may have removed it before it was
    there, and its row with it.
    """
    audio_sha256 = object_name.split("/")[2]
    has_file = select(stored_file.c.id).where(
        stored_file.c.audio_sha256 == audio_sha256,
        stored_file.c.object_name == object_name,
    )
    if db.execute(has_file).first() is None:
        let_go(db, object_name, audio_sha256)


def let_go_of_audio(db: Connection, audio_sha256: str) -> None:
    """Take every object of an audio that is being made from whoever makes it.

    One that may arrive late is nobody's already, and is removed when it has.
    """
    where = loose_object.c.audio_sha256 == audio_sha256, _IS_BEING_MADE
    db.execute(loose_object.update().where(*where).values(removable_from=NOW))


def take_removable(
    db: Connection, limit: int, audio_sha256: str | None = None
) -> list[str]:
    """Name objects that are to be removed; from here on nobody can claim them.

    Who is claiming one at this moment is waited for, and keeps it.
    """
    due = _NAMES.where(loose_object.c.removable_from <= NOW, ~_HAS_FILE)
    if audio_sha256 is not None:
        due = due.where(loose_object.c.audio_sha256 == audio_sha256)
    due = due.order_by(loose_object.c.removable_from).limit(limit)
    # Asked once more as it is updated: what was claimed meanwhile is not there.
    where = loose_object.c.object_name.in_(due), loose_object.c.removable_from <= NOW
    same = {"removable_from": loose_object.c.removable_from}
    taken = loose_object.update().where(*where).values(**same)
    return list(db.execute(taken.returning(loose_object.c.object_name)).scalars())


def removed(db: Connection, object_names: list[str]) -> None:
    """Delete the rows of objects that are gone."""
    where = loose_object.c.object_name.in_(object_names)
    db.execute(loose_object.delete().where(where))


def names(db: Connection) -> set[str]:
    """All that are written down here."""
    return set(db.execute(_NAMES).scalars())


def overdue(db: Connection) -> list[str]:
    """Those that were to be removed long ago and are not yet, in order."""
    overdue_from = NOW - OVERDUE_SECONDS
    due = _NAMES.where(loose_object.c.removable_from <= overdue_from, ~_HAS_FILE)
    return list(db.execute(due.order_by(loose_object.c.object_name)).scalars())
