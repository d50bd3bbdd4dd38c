"""Storing and removing the bytes of a bucket; `DirectoryOwner` does so in a directory.

Methods that take a connection are called in a write transaction of the catalogue, and
do not wait for a network. Every method raises StorageError if the catalogue, the bucket
or the disk fails, unless it says otherwise. Reading is in `store.reading`.

An object's name is never used again, and a row names it. So no object is overwritten, a
late reader finds no object rather than other bytes, and no lock is held during a
request to the bucket.
"""

from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from vllm_tts_cache.catalogue import objects, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.errors import ObjectStoreError, StorageError
from vllm_tts_cache.store.directory import DirectoryOwner, Staged, TakenAwayError
from vllm_tts_cache.store.reading import Copies

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

    def stage(self, data: bytes, audio_sha256: str, artifact: str) -> Staged:
        """Announce an object and store it; `sweep` removes it if this process dies."""
        name = objects.new_name(audio_sha256)
        with self._database.read() as db:
            objects.announce(db, name, audio_sha256)
        try:
            self.bucket.put(name, data)
        except ObjectStoreError:
            # The bucket may have stored it all the same, or may do so late.
            with suppress(StorageError), self._database.read() as db:
                objects.release(db, name, audio_sha256, is_late=True)
            raise
        return Staged(
            data=data, audio_sha256=audio_sha256, artifact=artifact, object_name=name
        )

    def place(self, staged: Staged, db: Connection) -> None:
        """Claim the object for its row. Raises: TakenAwayError: Stage it anew."""
        if staged.object_name is None or not objects.claim(db, staged.object_name):
            raise TakenAwayError

    def unstage(self, staged: Staged) -> None:
        """Keep a copy if a row has the object; else leave the object to `sweep`.

        Raises nothing.
        """
        with suppress(StorageError):
            with self._database.read() as db:
                objects.release_announced(db, str(staged.object_name))
                file = stored_files.find(db, staged.audio_sha256, staged.artifact)
            if file is not None and file.object_name == staged.object_name:
                self.copies.keep(file, staged.data)

    def remove(
        self, _db: Connection, audio_sha256: str, artifacts: Collection[str]
    ) -> None:
        """Remove copies; deleting the rows leaves the objects to `sweep`."""
        self.files.remove(audio_sha256, artifacts)

    def discard(
        self, db: Connection, audio_sha256: str, keep: Collection[str], _id: int
    ) -> None:
        """Unless artifacts are kept, have `place` refuse staged bytes of the audio."""
        if not keep:
            objects.release_audio(db, audio_sha256)

    def finish_discard(self, audio_sha256: str | None, _id: int) -> None:
        """Remove all copies and objects of the audio that have no row."""
        if audio_sha256 is not None:
            self.copies.delete_unstored(audio_sha256)
            self.sweep(audio_sha256)

    def remove_strays(self) -> list[str]:
        """Remove objects without a row; restoring an older catalogue leaves such.

        An object that is being made has been announced, and stays. Lists the whole
        bucket; returns a line for each object that was removed.
        """
        prefixes = sorted(self.bucket.folders(objects.FOLDER))
        strays = [name for prefix in prefixes for name in self._strays(prefix)]
        self.sweep()
        return [f"removed {name}, which had no row" for name in strays]

    def sweep(self, audio_sha256: str | None = None) -> int:
        """Remove released objects, of one audio or of all; return their number."""
        num_removed = 0
        while True:
            with self._database.read() as db:
                names = objects.take_removable(db, _SWEPT_AT_ONCE, audio_sha256)
            if not names:
                return num_removed
            self.bucket.delete(names)
            with self._database.read() as db:
                objects.delete_rows(db, names)
            num_removed += len(names)

    def _strays(self, prefix: str) -> list[str]:
        sizes = self.bucket.sizes(f"{objects.FOLDER}/{prefix}")
        names = {name for name, _ in sizes if objects.NAME.fullmatch(name)}
        with self._database.read() as db:
            announced = objects.names(db)
            # Rows are read last: an object claimed in between is in one of the sets.
            rows = stored_files.between(db, prefix, prefix + "g")
            strays = sorted(names - announced - {row.object_name for row in rows})
            for name in strays:
                objects.release_announced(db, name)
        return strays


BlobOwner = DirectoryOwner | BucketOwner
