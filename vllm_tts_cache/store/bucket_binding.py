"""Whose objects a catalogue tells of; as `binding`, of a bucket."""

import logging
from typing import TYPE_CHECKING

from vllm_tts_cache.catalogue import stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.errors import ConfigError, ObjectStoreError, StorageError
from vllm_tts_cache.store.binding import (
    CATALOGUE_ID,
    OBJECT_STORE,
    bound_to,
    write_home,
)

if TYPE_CHECKING:
    from vllm_tts_cache.store.bucket import Bucket

logger = logging.getLogger("vllm.vllm_tts_cache")


def bind(bucket: "Bucket", database: Database) -> str:
    """Make catalogue and bucket known to each other, once; return the catalogue's id.

    A bucket that is down now is looked at later, if it was bound before: what is on
    this machine speaks.

    Raises:
        ConfigError: One of them belongs to another.
        StorageError: It could not be read or written.
    """
    with database.read() as db:
        bound = bound_to(db)
    if bound is not None:
        try:
            return check(bucket, database)
        except ObjectStoreError as exc:
            logger.warning("%s It is looked at again.", exc.log_text)
            return bound[0]
    if bucket.get(CATALOGUE_ID) is not None:
        raise _foreign(bucket, database)
    with database.write() as db:
        if bound_to(db) is None:
            write_home(db, OBJECT_STORE, bucket.where)
    return check(bucket, database)


def check(bucket: "Bucket", database: Database) -> str:
    """Refuse a catalogue and a bucket that do not belong together.

    Returns:
        The catalogue's id.

    Raises: ConfigError, StorageError.
    """
    with database.read() as db:
        row, is_empty = bound_to(db), stored_files.last_id(db) == 0
    if row is None or row[1] != OBJECT_STORE:
        raise ConfigError(
            f"The voice catalogue {database.where} is of the files in "
            f"{'a directory' if row is None else row[2]}, not of {bucket.where}. Take "
            "its voices along with `vllm-tts-cache migrate`, or unset "
            "SPEAKER_STORE_URL."
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


def check_still(bucket: "Bucket", database: Database) -> None:
    """See that the bucket has not become another since it was bound.

    Raises: StorageError.
    """
    try:
        check(bucket, database)
    except ConfigError as exc:
        raise StorageError(str(exc)) from exc


def _foreign(bucket: "Bucket", database: Database) -> ConfigError:
    return ConfigError(
        f"The objects in {bucket.where} are of another voice catalogue than "
        f"{database.where}, which knows none of them. Correct SPEAKER_STORE_URL or "
        "SPEAKER_CATALOGUE_URL, or restore the database from its backup."
    )
