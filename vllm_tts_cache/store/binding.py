"""Which files a catalogue on a server is of, and which catalogue they are of.

A recovery removes files that the catalogue has no row of, and rows without a file. With
another catalogue, directory or bucket that would be all of them: so the catalogue and
the place of its files know each other, and neither is used with another one.

A worker may run on another machine than the API process, where a path says nothing. So
the directory holds a file with an id of its own, and processes compare that.
"""

import logging
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, select

from vllm_tts_cache.catalogue import schema, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.sqlite import FILE_NAME
from vllm_tts_cache.errors import (
    ConfigError,
    NoCatalogueError,
    ObjectStoreError,
    StorageError,
)
from vllm_tts_cache.files import publish_once, read_whole, storage_errors

if TYPE_CHECKING:
    from vllm_tts_cache.store.bucket import Bucket

logger = logging.getLogger("vllm.vllm_tts_cache")

CATALOGUE_ID = "catalogue-id"
# What a catalogue of a bucket has in the place of a directory's id.
OBJECT_STORE = "object store"
ID_FILE_NAME = "directory-id"
_ID_BYTES = 16


def check_file(root: Path) -> None:
    """Refuse a catalogue in the directory where that on a server is meant.

    Raises: ConfigError.
    """
    if _catalogue_of(root):
        raise ConfigError(
            f"The voices in SPEAKER_SAMPLES_DIR={str(root)!r} are in a catalogue on "
            "PostgreSQL: set SPEAKER_CATALOGUE_URL as the server that stored them does."
        )


def check_server(root: Path) -> None:
    """Refuse a catalogue on a server where there is one in the directory.

    Raises: ConfigError.
    """
    if (root / FILE_NAME).exists():
        raise ConfigError(
            f"SPEAKER_SAMPLES_DIR={str(root)!r} has a catalogue of its own, "
            f"{FILE_NAME}, of whose voices that of SPEAKER_CATALOGUE_URL knows "
            "nothing. Set SPEAKER_SAMPLES_DIR to another directory, and take its "
            "voices along with `vllm-tts-cache voices export` and `import`."
        )


def bind(root: Path, database: Database) -> None:
    """Make catalogue and directory known to each other, once.

    Raises: ConfigError: One of them belongs to another.
    """
    here = store_id_of(root)
    if not here.id:
        raise StorageError(f"{root / ID_FILE_NAME} cannot be written or read.")
    with database.write() as db:
        if _bound_to(db) is None:
            if _catalogue_of(root):
                raise _foreign(root, database)
            _write_home(db, here.id, here.place)
    catalogue_id = check(root, database)
    with storage_errors(root):
        publish_once(root / CATALOGUE_ID, catalogue_id.encode())
    check(root, database)  # another server may have been there first


def check(root: Path, database: Database) -> str:
    """Return the catalogue's id, and refuse a directory that is not of it.

    Raises: ConfigError.
    """
    with database.read() as db:
        row = _bound_to(db)
    if row is None:
        raise NoCatalogueError(
            f"The voice catalogue {database.where} is empty: no server has stored "
            "voices there. Start the server once, or correct SPEAKER_CATALOGUE_URL."
        )
    catalogue_id, directory_id, place = row
    if directory_id == OBJECT_STORE:
        raise ConfigError(
            f"The voice catalogue {database.where} is of the objects in {place}: set "
            "SPEAKER_STORE_URL as the servers do that stored them."
        )
    here = store_id_of(root)
    if directory_id != here.id:
        raise ConfigError(
            f"The voice catalogue {database.where} is of the files in {place}, and "
            f"SPEAKER_SAMPLES_DIR is {here.place}, another directory. Servers that "
            "share a catalogue share one directory. If it is the same one, moved or "
            f"restored, write {directory_id} into its file {ID_FILE_NAME}."
        )
    if _catalogue_of(root) not in ("", catalogue_id):
        raise _foreign(root, database)
    return catalogue_id


def check_still(place: "Path | Bucket", database: Database) -> None:
    """See that the files have not been taken away, or become others', since `bind`.

    Raises: StorageError.
    """
    try:
        if not isinstance(place, Path):
            check_bucket(place, database)
            return
        catalogue_id = check(place, database)
    except ConfigError as exc:
        raise StorageError(str(exc)) from exc
    if _catalogue_of(place) != catalogue_id:
        raise StorageError(
            f"SPEAKER_SAMPLES_DIR={str(place)!r} has lost its file {CATALOGUE_ID}: "
            "is it mounted? Nothing was removed."
        )


def bind_bucket(bucket: "Bucket", database: Database) -> str:
    """Make catalogue and bucket known to each other, once; return the catalogue's id.

    A bucket that is down is looked at later, if it was bound before: what is on this
    machine speaks.

    Raises:
        ConfigError: One of them belongs to another.
        StorageError: It could not be read or written.
    """
    error = marker = None
    try:
        marker = bucket.get(CATALOGUE_ID)
    except ObjectStoreError as exc:
        error = exc
    # After the marker, which a server that is the first writes after the row.
    with database.read() as db:
        bound = _bound_to(db)
    if error is not None:
        if bound is None:
            raise error
        if bound[1] == OBJECT_STORE:
            logger.warning("%s It is looked at again.", error.log_text)
            return bound[0]
    elif bound is None:
        if marker is not None:
            raise _foreign(bucket, database)
        with database.write() as db:
            if _bound_to(db) is None:
                _write_home(db, OBJECT_STORE, bucket.where)
    return check_bucket(bucket, database)


def check_bucket(bucket: "Bucket", database: Database) -> str:
    """As `check`, for a bucket. Raises: ConfigError, StorageError."""
    with database.read() as db:
        row, is_empty = _bound_to(db), stored_files.last_id(db) == 0
    if row is None or row[1] != OBJECT_STORE:
        raise ConfigError(
            f"The voice catalogue {database.where} is of the files in "
            f"{'a directory' if row is None else row[2]}, not of {bucket.where}. Take "
            "its voices along with `vllm-tts-cache voices export` and `import`, or "
            "unset SPEAKER_STORE_URL."
        )
    catalogue_id = row[0]
    marker = bucket.get(CATALOGUE_ID)
    if marker is None and is_empty:
        bucket.put(CATALOGUE_ID, catalogue_id.encode())
    elif marker is None:
        raise ObjectStoreError(
            bucket.where,
            f"it has lost its object {CATALOGUE_ID}: is it the right bucket?",
        )
    elif marker.decode("ascii", "replace").strip() != catalogue_id:
        raise _foreign(bucket, database)
    return catalogue_id


def _foreign(place: "Path | Bucket", database: Database) -> ConfigError:
    if isinstance(place, Path):
        what = f"files in SPEAKER_SAMPLES_DIR={str(place)!r}"
        settings = "one of the two settings"
    else:
        what = f"objects in {place.where}"
        settings = "SPEAKER_STORE_URL or SPEAKER_CATALOGUE_URL"
    return ConfigError(
        f"The {what} are of another voice catalogue than {database.where}, which knows "
        f"none of them. Correct {settings}, or restore the database from its backup."
    )


def _bound_to(db: Connection) -> tuple[str, str, str] | None:
    """The catalogue's id, the id of the place of its files, and where that is."""
    columns = schema.home.c
    query = select(columns.catalogue_id, columns.directory_id, columns.place)
    return db.execute(query).tuples().first()


def _write_home(db: Connection, directory_id: str, place: str) -> None:
    row = {"catalogue_id": secrets.token_hex(_ID_BYTES), "place": place}
    db.execute(schema.home.insert(), {**row, "directory_id": directory_id})


def _catalogue_of(root: Path) -> str:
    blob = read_whole(str(root / CATALOGUE_ID))
    return "" if blob is None else blob.decode("ascii", "replace").strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreId:
    """Where a process has its files; processes compare it.

    Attributes:
        id: Of a directory, what its marker file holds, and empty if there is none; of
            a bucket, the id of its catalogue.
        place: Host and path, or the bucket's URL, for people.
    """

    id: str = ""
    place: str = ""

    def is_elsewhere(self, other: "StoreId") -> bool:
        """Tell whether these are two directories; False where nobody can know."""
        return bool(self.id and other.id) and self.id != other.id


def mark(root: Path) -> None:
    """Give the directory its id, unless it has one.

    It serves a diagnosis only: a disk that does not take it is no error.
    """
    with suppress(OSError):
        publish_once(root / ID_FILE_NAME, secrets.token_hex(_ID_BYTES).encode())


def store_id_of(root: Path) -> StoreId:
    """Return a directory as this process sees it; nothing is written."""
    found = ""
    with suppress(OSError, UnicodeDecodeError):
        found = (root / ID_FILE_NAME).read_text(encoding="ascii").strip()
    return StoreId(id=found, place=f"{socket.gethostname()}:{root}")
