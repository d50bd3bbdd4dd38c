"""Storing and removing bytes, for those who own them: see `store.reading` for the rest.

Methods that take a connection are called in a write transaction of the catalogue, and
do not wait for a network. Every method raises StorageError if what it needs fails,
unless it says otherwise.

Every object of a bucket has a name of its own that is never used again, and a row that
names it: so nothing is written over, a reader that comes late finds nothing rather than
other bytes, and no lock is held over a request to the bucket.
"""

from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from vllm_tts_cache.catalogue import objects, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.errors import ObjectStoreError, StorageError
from vllm_tts_cache.store.copies import Copies
from vllm_tts_cache.store.directory import DirectoryOwner, Staged, TakenAwayError

if TYPE_CHECKING:
    from vllm_tts_cache.store.bucket import Bucket

_SWEPT_AT_ONCE = 200


class BucketOwner:
    """Stores and removes the objects of a bucket, and this machine's copies of them."""

    def __init__(self, database: Database, bucket: "Bucket", copies: Copies):
        self._database = database
        self.bucket = bucket
        self.copies = copies
        self.files = copies.directory

    def stage(self, data: bytes, audio_sha256: str, kind: str) -> Staged:
        """Make an object that is announced; of a killed process it is swept in time."""
        name = objects.new_name(audio_sha256)
        with self._database.read() as db:
            objects.announce(db, name, audio_sha256)
        try:
            self.bucket.put(name, data)
        except ObjectStoreError:
            # It may have arrived all the same, or arrive yet.
            with suppress(StorageError), self._database.read() as db:
                objects.let_go(db, name, audio_sha256, is_late=True)
            raise
        return Staged(data=data, audio_sha256=audio_sha256, kind=kind, object_name=name)

    def place(self, db: Connection, staged: Staged) -> str | None:
        """As of a directory: the row takes the object."""
        name = staged.object_name
        if name is None or not objects.claim(db, name):
            raise TakenAwayError
        return name

    def unstage(self, staged: Staged) -> None:
        """Keep a copy of what a row has, and have the object removed of what none has.

        Raises nothing.
        """
        with suppress(StorageError):
            with self._database.read() as db:
                objects.let_go_of_announced(db, str(staged.object_name))
                file = stored_files.find(db, staged.audio_sha256, staged.kind)
            if file is not None and file.object_name == staged.object_name:
                self.copies.keep(file, staged.data)

    def remove(self, db: Connection, audio_sha256: str, kinds: Collection[str]) -> None:
        """Remove copies; the objects are let go with their rows."""
        del db
        self.files.remove(audio_sha256, kinds)

    def discard(
        self, db: Connection, audio_sha256: str, keep: Collection[str], deletion_id: int
    ) -> None:
        """As of a directory: objects that are being made are not placed any more."""
        del deletion_id
        if not keep:
            objects.let_go_of_audio(db, audio_sha256)

    def finish_discard(self, audio_sha256: str | None, deletion_id: int) -> None:
        """Remove all objects of the audio that have no row."""
        del deletion_id
        if audio_sha256 is not None:
            self.copies.delete_unstored(audio_sha256)
            self.sweep(audio_sha256)

    def remove_strays(self) -> list[str]:
        """Remove objects without a row, as there are beside an older catalogue.

        One that is being made was announced before. Returns what was removed, a line
        each; it lists the whole bucket.
        """
        strays = [
            name
            for prefix in sorted(self.bucket.folders(objects.FOLDER))
            for name in self._strays(prefix)
        ]
        self.sweep()
        return [f"removed {name}, which nobody had" for name in strays]

    def sweep(self, audio_sha256: str | None = None) -> int:
        """Remove objects, of an audio or of all, that were let go; return how many."""
        num_removed = 0
        while True:
            with self._database.read() as db:
                names = objects.take_removable(db, _SWEPT_AT_ONCE, audio_sha256)
            if not names:
                return num_removed
            self.bucket.delete(names)
            with self._database.read() as db:
                objects.removed(db, names)
            num_removed += len(names)

    def _strays(self, prefix: str) -> list[str]:
        sizes = self.bucket.sizes(f"{objects.FOLDER}/{prefix}")
        names = {name for name, _ in sizes if objects.is_name(name)}
        with self._database.read() as db:
            announced = objects.names(db)
        # Later, so that what was claimed between is seen in one of the two.
        with self._database.read() as db:
            rows = stored_files.between(db, prefix, prefix + "g")
        strays = sorted(names - announced - {row.object_name for row in rows})
        with self._database.read() as db:
            for name in strays:
                objects.let_go_of_announced(db, name)
        return strays


BlobOwner = DirectoryOwner | BucketOwner
