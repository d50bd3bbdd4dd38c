"""Stored bytes in a bucket, and what this machine has of them in its directory.

Every object has a name of its own that is never used again, and a row that names it:
so nothing is written over, a reader that comes late finds nothing rather than another
thing, and no lock is held over a request to the bucket. Files of the directory are
copies: any of them may be missing, and none outlives its row here for long.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import Connection

from vllm_tts_cache.catalogue import deletions, objects, owners, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.records import AUDIO_KIND, Segment
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import (
    ConfigError,
    EncodingCorruptError,
    ObjectStoreError,
    SourceCorruptError,
    StorageError,
    StorageUnavailableError,
)
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.store import audio_file
from vllm_tts_cache.store.audio_file import named
from vllm_tts_cache.store.binding import (
    CATALOGUE_ID,
    OBJECT_STORE,
    StoreId,
    bound_to,
    write_home,
)
from vllm_tts_cache.store.blobs import Staged, TakenAwayError
from vllm_tts_cache.store.bucket import Copies
from vllm_tts_cache.store.directory import StoreDirectory
from vllm_tts_cache.store.memory import Counters

if TYPE_CHECKING:
    from vllm_tts_cache.store.bucket import Bucket

T = TypeVar("T")

_SWEPT_AT_ONCE = 200
_CORRUPT = (EncodingCorruptError, SourceCorruptError)

logger = logging.getLogger("vllm.vllm_tts_cache")

# What differs is looked at again so much later: somebody may be about to commit.
_SETTLE_SECONDS = 0.3


class BucketBlobs:
    """Objects of a `Bucket`, with copies in a `StoreDirectory`; see `Blobs`.

    Args:
        directory: Where the copies are.
        database: The catalogue's, on a server.
        bucket: Where the truth is.
        max_bytes: Of all copies.
        catalogue_id: Of the catalogue that the bucket is bound to.
    """

    is_remote = True

    def __init__(
        self,
        directory: StoreDirectory,
        database: Database,
        bucket: "Bucket",
        *,
        max_bytes: int,
        catalogue_id: str,
    ):
        self._files = directory
        self._database = database
        self._bucket = bucket
        self.store_id = StoreId(id=catalogue_id, place=bucket.where)
        self.copies = Copies(directory, max_bytes)
        self._counters = Counters()
        self._log = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

    def counts(self) -> dict[str, int]:
        """How many objects were fetched, were not there, and were damaged."""
        counted = self._counters.snapshot()
        return {name: counted[name] for name in ("fetched", "lost", "corrupt")}

    def has(self, file: StoredFile | None) -> bool:
        """Whether there is a row: it is written when its object is whole."""
        return file is not None

    def stage(self, data: bytes, audio_sha256: str) -> Staged:
        """Make an object that is announced; whoever dies now has it swept in time."""
        name = objects.new_name(audio_sha256)
        with self._database.alone() as db:
            objects.announce(db, name, audio_sha256)
        try:
            self._bucket.put(name, data)
        except ObjectStoreError:
            # It may have arrived all the same, or arrive yet.
            self._let_go(name, audio_sha256)
            raise
        return Staged(data=data, object_name=name)

    def place(
        self, db: Connection, staged: Staged, audio_sha256: str, kind: str
    ) -> str | None:
        """Take the object for the row."""
        del audio_sha256, kind
        name = staged.object_name
        if name is None or not objects.claim(db, name):
            raise TakenAwayError
        return name

    def unstage(self, staged: Staged) -> None:
        """Have the object removed, unless a row has it."""
        if (name := staged.object_name) is None:
            return
        with suppress(StorageError), self._database.alone() as db:
            objects.let_go_of_announced(db, name)

    def unplace(self, audio_sha256: str, kind: str, db: Connection) -> None:
        """Nothing: the claim was undone with its transaction."""

    def cache(self, staged: Staged, audio_sha256: str, kind: str) -> None:
        """Keep a copy, for the worker that is going to ask for it."""
        with suppress(StorageError):
            self._keep(audio_sha256, kind, staged.data, staged.object_name)

    def read(
        self, audio_sha256: str, kind: str, parse: Callable[[bytes], T]
    ) -> T | None:
        """Read the copy, or the object, of which there is a copy then."""
        with suppress(*_CORRUPT):
            if (found := self.read_here(audio_sha256, kind, parse)) is not None:
                return found
        for is_last in (False, True):
            file = self._row(audio_sha256, kind)
            if file is None or file.object_name is None:
                return None
            try:
                blob = self._fetched(file)
                found = None if blob is None else parse(blob)
            except _CORRUPT:
                # Once more: it may have been damaged on its way.
                if is_last:
                    self._counters.add("corrupt")
                    self._delete_row(file)
                    raise
                continue
            if blob is not None:
                self._keep(audio_sha256, kind, blob, file.object_name)
                return found
            if is_last:  # not replaced meanwhile either
                self._lost(file)
        return None

    def read_here(
        self, audio_sha256: str, kind: str, parse: Callable[[bytes], T]
    ) -> T | None:
        """Read the copy."""
        blob = self.copies.read(audio_sha256, kind)
        try:
            return None if blob is None else parse(blob)
        except _CORRUPT:
            with suppress(StorageError):
                self._files.remove(audio_sha256, [kind])
            raise

    def remove(self, db: Connection, audio_sha256: str, kinds: Collection[str]) -> None:
        """Remove copies; the objects are let go with their rows."""
        del db
        self._files.remove(audio_sha256, kinds)

    def discard(
        self, db: Connection, audio_sha256: str, keep: Collection[str], deletion_id: int
    ) -> None:
        """Take objects that are being made from whoever makes them."""
        del deletion_id
        if not keep:
            objects.let_go_of_audio(db, audio_sha256)

    def finish_discard(self, audio_sha256: str | None, deletion_id: int) -> None:
        """Remove all objects of the audio that nobody has."""
        del deletion_id
        if audio_sha256 is None:
            return
        self.delete_unstored(audio_sha256)
        self._sweep(audio_sha256)

    def has_copies(self, audio_sha256: str) -> bool:
        """Whether there are copies."""
        return self._files.has_any(audio_sha256)

    def delete_copies(self, audio_sha256: str) -> None:
        """Delete the copies."""
        self._files.remove_all(audio_sha256)

    def delete_unstored(self, audio_sha256: str) -> None:
        """Delete the copies that no row tells of."""
        with self._database.read() as db:
            stored = {file.kind for file in stored_files.of_audio(db, audio_sha256)}
        self._files.remove(audio_sha256, self._files.kinds(audio_sha256) - stored)

    def check_still(self) -> None:
        """See that the bucket is the catalogue's."""
        check_still(self._bucket, self._database)

    def problems(self) -> list[str]:
        """Compare objects, copies and rows."""
        return bucket_problems(self._bucket, self._files, self._database)

    def remove_strays(self) -> list[str]:
        """Remove objects without a row, as there are beside an older catalogue.

        Whoever makes one has announced it before: none is taken from anybody.
        """
        strays = [
            name
            for prefix in sorted(self._bucket.folders(objects.FOLDER))
            for name in self._strays(prefix)
        ]
        self.sweep()
        return [f"removed {name}, which nobody had" for name in strays]

    def _strays(self, prefix: str) -> list[str]:
        sizes = self._bucket.sizes(f"{objects.FOLDER}/{prefix}")
        names = {name for name, _ in sizes if objects.is_name(name)}
        with self._database.read() as db:
            announced = objects.names(db)
        # Later, so that what was claimed between is seen in one of the two.
        with self._database.read() as db:
            rows = stored_files.between(db, prefix, prefix + "g")
        strays = sorted(names - announced - {row.object_name for row in rows})
        with self._database.alone() as db:
            for name in strays:
                objects.let_go_of_announced(db, name)
        return strays

    def sweep(self) -> int:
        """Remove objects that nobody has; returns how many there were."""
        return self._sweep(None)

    def _sweep(self, audio_sha256: str | None) -> int:
        num_removed = 0
        while True:
            with self._database.alone() as db:
                names = objects.take_removable(db, _SWEPT_AT_ONCE, audio_sha256)
            if not names:
                return num_removed
            self._bucket.delete(names)
            with self._database.alone() as db:
                objects.removed(db, names)
            num_removed += len(names)

    def _fetched(self, file: StoredFile) -> bytes | None:
        name = str(file.object_name)
        blob = self._bucket.get(name)
        if blob is not None and len(blob) != file.num_bytes:
            raise ObjectStoreError(
                self._bucket.where,
                f"{name} has {len(blob)} bytes instead of {file.num_bytes}",
            )
        self._counters.add("fetched")
        return blob

    def _keep(self, sha: str, kind: str, blob: bytes, object_name: str | None) -> None:
        """Write a copy, and delete it if its row is not there any more.

        Who deletes removes the copies after the row: one of the two sees the other.
        """
        try:
            self.copies.write(sha, kind, blob)
        except StorageError as exc:  # it is read from the bucket again
            self._log.warn_of("copies", "Keeping a copy of an object: %s", exc)
            return
        try:
            file = self._row(sha, kind)
            is_current = file is not None and file.object_name == object_name
        except StorageError:
            is_current = False
        if not is_current:
            self._files.remove(sha, [kind])

    def _row(self, sha: str, kind: str) -> StoredFile | None:
        with self._database.read() as db:
            return stored_files.find(db, sha, kind)

    def _lost(self, file: StoredFile) -> None:
        """An object is not there: delete its row, if the bucket itself is.

        Raises:
            StorageError: The bucket is not there either.
        """
        self.check_still()
        self._counters.add("lost")
        self._log.warn_of(
            "a lost object",
            "%s is not in the bucket; its row is deleted: an encoding is made anew, "
            "audio is to be registered again.",
            file.object_name,
        )
        self._delete_row(file)

    def _delete_row(self, file: StoredFile) -> None:
        with suppress(StorageUnavailableError), self._database.write() as db:
            now = stored_files.find(db, file.audio_sha256, file.kind)
            if now is not None and now.object_name == file.object_name:
                stored_files.remove(db, file.audio_sha256, [file.kind])

    def _let_go(self, name: str, audio_sha256: str) -> None:
        with suppress(StorageError), self._database.alone() as db:
            objects.let_go(db, name, audio_sha256, is_late=True)


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


def bucket_problems(
    bucket: "Bucket", directory: StoreDirectory, database: Database
) -> list[str]:
    """Read every object, copy and row; one line for each thing that is wrong.

    Others may go on using them.

    Raises:
        StorageError: The catalogue or the bucket could not be read.
        ConfigError: They do not belong together.
    """
    check(bucket, database)
    found = [*_deletion_problems(database)]
    found += [f"left behind: {path}" for path in directory.leftovers()]
    for prefix in sorted(_prefixes(bucket, directory, database)):
        if set(_differences(bucket, database, prefix)):
            time.sleep(_SETTLE_SECONDS)
            found += _differences(bucket, database, prefix)
        for row in _rows(database, prefix):
            found += _corrupt(bucket, row)
        found += _copy_problems(directory, database, prefix)
    return found


def _deletion_problems(database: Database) -> list[str]:
    with database.read() as db:
        unfinished = deletions.unfinished(db)
        due = objects.overdue(db)
    return [
        *(f"deletion {deletion.id}: not finished" for deletion in unfinished),
        *(f"left behind in the bucket: {name}" for name in due),
    ]


def _prefixes(
    bucket: "Bucket", directory: StoreDirectory, database: Database
) -> set[str]:
    with database.read() as db:
        known = stored_files.prefixes(db) | owners.audio_prefixes(db)
    return known | {*directory.prefixes(), *bucket.folders(objects.FOLDER)}


def _rows(database: Database, prefix: str) -> list[StoredFile]:
    with database.read() as db:
        return stored_files.between(db, prefix, prefix + "g")


def _differences(bucket: "Bucket", database: Database, prefix: str) -> Iterator[str]:
    # The rows before and after: what was stored or removed meanwhile is in one of them.
    before = _rows(database, prefix)
    sizes = dict(bucket.sizes(f"{objects.FOLDER}/{prefix}"))
    after = {row.object_name: row for row in _rows(database, prefix)}
    with database.read() as db:
        loose = objects.names(db)
        referenced = owners.audio_between(db, prefix, prefix + "g")
    for row in before:
        if row.object_name in after and row.object_name not in sizes:
            yield f"audio {row.audio_sha256}: its {named(row.kind)} is not there"
        elif sizes.get(str(row.object_name), row.num_bytes) != row.num_bytes:
            name = named(row.kind)
            yield f"audio {row.audio_sha256}: its {name} has not {row.num_bytes} bytes"
    known = {row.object_name for row in before} | after.keys() | loose
    for name in sorted(sizes.keys() - known):
        yield f"nobody has the object {name}"
    yield from _segment_problems(list(after.values()), referenced)


def _segment_problems(rows: list[StoredFile], referenced: set[str]) -> Iterator[str]:
    stored = {row.audio_sha256 for row in rows if row.kind == AUDIO_KIND}
    for sha in sorted(referenced - stored):
        yield f"audio {sha}: not stored"
    for row in rows:
        is_owned = row.audio_sha256 in referenced
        if row.segment is not (Segment.REGISTERED if is_owned else Segment.INLINE):
            name = named(row.kind)
            yield f"audio {row.audio_sha256}: its {name} counts as {row.segment.value}"


def _corrupt(bucket: "Bucket", row: StoredFile) -> Iterator[str]:
    try:
        if (blob := bucket.get(str(row.object_name))) is not None:
            audio_file.check(blob, row.audio_sha256, row.kind)
    except (EncodingCorruptError, SourceCorruptError) as exc:
        yield f"corrupt: {row.object_name}: {exc.reason}"
    except StorageError as exc:
        yield f"unreadable: {exc.log_text}"


def _copy_problems(
    directory: StoreDirectory, database: Database, prefix: str
) -> Iterator[str]:
    for path in directory.misplaced(prefix):
        yield f"misnamed: {path}"
    kinds = {sha: directory.kinds(sha) for sha in directory.addresses(prefix)}
    stored = {(row.audio_sha256, row.kind) for row in _rows(database, prefix)}
    for sha, kind in sorted(
        (sha, kind) for sha, some in kinds.items() for kind in some
    ):
        if (sha, kind) not in stored:
            yield f"audio {sha}: nobody has the copy of its {named(kind)}"
            continue
        try:
            if (blob := directory.read(sha, kind)) is not None:
                audio_file.check(blob, sha, kind)
        except (EncodingCorruptError, SourceCorruptError) as exc:
            yield f"corrupt: {directory.file_name(sha, kind)}: {exc.reason}"
