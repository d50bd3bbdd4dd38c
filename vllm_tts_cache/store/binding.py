"""Binds a PostgreSQL catalogue to the directory or the bucket that has its files.

A recovery removes files without a row and rows without a file. With another catalogue,
directory or bucket that would be all of them. So each stores the id of the other, and
neither is used with another one.

A worker may run on another machine than the API process, where the same path may be
another directory. So the directory holds a file with its id, which processes compare.
"""

import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, select

from vllm_tts_cache import errors
from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.sqlite import FILE_NAME
from vllm_tts_cache.files import publish_once, storage_errors
from vllm_tts_cache.logs import logger

if TYPE_CHECKING:
    from vllm_tts_cache.store.bucket import Bucket


CATALOGUE_ID = "catalogue-id"
# The directory id of a catalogue that is bound to a bucket, and of one whose bucket a
# server is about to mark: a lost mark must not look like one that was never made.
OBJECT_STORE = "object store"
NEW_OBJECT_STORE = "object store, not marked yet"
ID_FILE_NAME = "directory-id"
_ID_BYTES = 16


def check_file(root: Path) -> None:
    """Refuse a catalogue in a directory whose catalogue is on PostgreSQL.

    Raises: ConfigError.
    """
    if _catalogue_of(root):
        raise errors.ConfigError(
            f"The voices in SPEAKER_SAMPLES_DIR={str(root)!r} are in a catalogue on "
            "PostgreSQL: set SPEAKER_CATALOGUE_URL as the server that stored them does."
        )


def check_server(root: Path) -> None:
    """Refuse a catalogue on PostgreSQL for a directory that has its own.

    Raises: ConfigError.
    """
    if (root / FILE_NAME).exists():
        raise errors.ConfigError(
            f"SPEAKER_SAMPLES_DIR={str(root)!r} has a catalogue of its own, "
            f"{FILE_NAME}, whose voices are not in that of SPEAKER_CATALOGUE_URL. Set "
            "SPEAKER_SAMPLES_DIR to another directory, and move the voices with "
            "`vllm-tts-cache voices export` and `import`."
        )


def bind(root: Path, database: Database) -> None:
    """Store the ids of catalogue and directory in each other, unless they are bound.

    Raises: ConfigError: One of the two is bound to a third; StorageError.
    """
    here = store_id_of(root)
    if not here.id:
        place = f"SPEAKER_SAMPLES_DIR: {root / ID_FILE_NAME}"
        raise errors.StorageError(f"{place} is unusable: correct its permissions.")
    with database.write() as db:
        if _bound_to(db) is None:
            if _catalogue_of(root):
                raise _foreign(root, database)
            _bind_to(db, here.id, here.place)
    catalogue_id = check(root, database)
    with storage_errors(root):
        publish_once(root / CATALOGUE_ID, catalogue_id.encode())
    check(root, database)  # another server may have bound it first


def check(root: Path, database: Database) -> str:
    """Return the catalogue's id if it is bound to this directory.

    Raises: ConfigError: The catalogue is bound to another directory, or to none.
    """
    with database.read() as db:
        row = _bound_to(db)
    if row is None:
        raise errors.NoCatalogueError(
            f"The voice catalogue {database.where} is empty: no server has stored "
            "voices there. Start the server once, or correct SPEAKER_CATALOGUE_URL."
        )
    catalogue_id, directory_id, place = row
    if directory_id == OBJECT_STORE:
        raise errors.ConfigError(
            f"The voice catalogue {database.where} is of the objects in {place}: set "
            "SPEAKER_STORE_URL as the servers do that stored them."
        )
    here = store_id_of(root)
    if directory_id != here.id:
        raise errors.ConfigError(
            f"The voice catalogue {database.where} is of the files in {place}, and "
            f"SPEAKER_SAMPLES_DIR is {here.place}, another directory. Servers that "
            "share a catalogue share one directory. If it is the same one, moved or "
            f"restored, write {directory_id} into its file {ID_FILE_NAME}."
        )
    if _catalogue_of(root) not in ("", catalogue_id):
        raise _foreign(root, database)
    return catalogue_id


def check_still(place: "Path | Bucket", database: Database) -> None:
    """Verify that the files are still there and bound to this catalogue.

    Raises: StorageError.
    """
    try:
        if not isinstance(place, Path):
            check_bucket(place, database)
            return
        catalogue_id = check(place, database)
    except errors.ConfigError as exc:
        raise errors.StorageError(str(exc)) from exc
    if _catalogue_of(place) != catalogue_id:
        raise errors.StorageError(
            f"SPEAKER_SAMPLES_DIR={str(place)!r} has lost its file {CATALOGUE_ID}: "
            "is it mounted? Nothing was removed."
        )


def bind_bucket(bucket: "Bucket", database: Database) -> str:
    """Bind catalogue and bucket as `bind` does; return the catalogue's id.

    Only this function marks a bucket. If the bucket is down but was bound before,
    `check_still` checks it later: voices with copies here can be spoken meanwhile.

    Raises:
        ConfigError: One of the two is bound to a third.
        StorageError: The bucket could not be read or written.
    """
    error = marker = None
    try:
        marker = bucket.get(CATALOGUE_ID)
    except errors.ObjectStoreError as exc:
        error = exc
    # Read after the marker: the first server writes the row before the marker.
    with database.read() as db:
        bound = _bound_to(db)
    if error is not None:
        if bound is None or bound[1] == NEW_OBJECT_STORE:
            raise error
        if bound[1] == OBJECT_STORE:
            logger.warning("%s It is checked again later.", error.log_text)
            return bound[0]
    elif bound is None:
        if marker is not None:
            raise _foreign(bucket, database)
        with database.write() as db:
            if (bound := _bound_to(db)) is None:
                bound = _bind_to(db, NEW_OBJECT_STORE, bucket.where)
    is_new = bound is not None and bound[1] == NEW_OBJECT_STORE
    if is_new:
        # Another catalogue's server may have marked it since: the check reads it again.
        bucket.put(CATALOGUE_ID, bound[0].encode(), is_new=True)
    catalogue_id = check_bucket(bucket, database)
    if is_new:
        with database.write() as db:
            db.execute(schema.binding.update().values(directory_id=OBJECT_STORE))
    return catalogue_id


def check_bucket(bucket: "Bucket", database: Database) -> str:
    """`check` a bucket; writes nothing. Raises: ConfigError, StorageError."""
    with database.read() as db:
        row = _bound_to(db)
    if row is None or row[1] not in (OBJECT_STORE, NEW_OBJECT_STORE):
        raise errors.ConfigError(
            f"The voice catalogue {database.where} is of the files in "
            f"{'a directory' if row is None else row[2]}, not of {bucket.where}. Take "
            "its voices along with `vllm-tts-cache voices export` and `import`, or "
            "unset SPEAKER_STORE_URL."
        )
    catalogue_id = row[0]
    marker = bucket.get(CATALOGUE_ID)
    if marker is None:
        raise errors.ObjectStoreError(
            bucket.where,
            f"it has no object {CATALOGUE_ID}: is it the right bucket? If it is, store "
            f"that object again, with {catalogue_id}",
        )
    if marker.decode("ascii", "replace").strip() != catalogue_id:
        raise _foreign(bucket, database)
    return catalogue_id


def _foreign(place: "Path | Bucket", database: Database) -> errors.ConfigError:
    if isinstance(place, Path):
        what = f"files in SPEAKER_SAMPLES_DIR={str(place)!r}"
        settings = "one of the two settings"
    else:
        what = f"objects in {place.where}"
        settings = "SPEAKER_STORE_URL or SPEAKER_CATALOGUE_URL"
    return errors.ConfigError(
        f"The {what} are of another voice catalogue than {database.where}, which knows "
        f"none of them. Correct {settings}, or restore the database from its backup."
    )


def _bound_to(db: Connection) -> tuple[str, str, str] | None:
    """Return (catalogue's id, directory's id, place of the files); None if unbound."""
    columns = schema.binding.c
    query = select(columns.catalogue_id, columns.directory_id, columns.place)
    return db.execute(query).tuples().first()


def _bind_to(db: Connection, directory_id: str, place: str) -> tuple[str, str, str]:
    row = (secrets.token_hex(_ID_BYTES), directory_id, place)
    db.execute(schema.binding.insert().values(row))
    return row


def _catalogue_of(root: Path) -> str:
    path = root / CATALOGUE_ID
    with storage_errors(path), suppress(FileNotFoundError):
        return path.read_text("ascii", "replace").strip()
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreId:
    """The place of a process's files; API processes and workers compare theirs.

    Attributes:
        id: For a directory the content of its file ``directory-id``, empty without it;
            for a bucket the id of its catalogue.
        place: Host and path, or the bucket's URL, for messages.
    """

    id: str = ""
    place: str = ""


def mark(root: Path) -> None:
    """Give the directory its id, unless it has one.

    A failure is no error here: `bind` needs the id and raises, others only compare it.
    """
    with suppress(OSError):
        publish_once(root / ID_FILE_NAME, secrets.token_hex(_ID_BYTES).encode())


def store_id_of(root: Path) -> StoreId:
    """Return the id of a directory as this process sees it; writes nothing."""
    found = ""
    with suppress(OSError, UnicodeDecodeError):
        found = (root / ID_FILE_NAME).read_text(encoding="ascii").strip()
    return StoreId(id=found, place=f"{socket.gethostname()}:{root}")
