"""Removing what a deletion leaves on disk, and setting aside audio that is wrong."""

from contextlib import suppress

from sqlalchemy import Connection

from vllm_tts_cache.catalogue import deletions, imports, speakers, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.imports import ImportedFile
from vllm_tts_cache.errors import SourceCorruptError
from vllm_tts_cache.files import storage_errors, sync_directory
from vllm_tts_cache.store import stored_audio
from vllm_tts_cache.store.directory import StoreDirectory
from vllm_tts_cache.store.keys import AUDIO_KIND


def remove_files(
    directory: StoreDirectory, database: Database, deletion: Deletion
) -> None:
    """Remove all of a deletion from disk, and write down that it is gone.

    Killed at any point it can be called again: until the last transaction the
    deletion says that there may be something.

    Raises:
        StorageError: Something is left.
    """
    with database.write() as db:
        found = deletions.get(db, deletion.id)
        if found is None or found.files_removed:
            return
        if (sha := found.deletion.audio_sha256) is not None:
            _discard(db, directory, sha, deletion.id)
        stock_files = imports.to_remove(db, deletion.id)
    directory.empty_trash(deletion.id)
    for file in stock_files:
        _remove_stock_file(directory, file)
    with database.write() as db:
        for file in stock_files:
            imports.forget_file(db, file.file_name)
        deletions.files_are_removed(db, deletion.id)
    database.wipe_log()


def set_aside_audio(
    directory: StoreDirectory, database: Database, audio_sha256: str
) -> None:
    """Move audio whose bytes are wrong into the quarantine, and its row with it.

    Raises:
        StorageError: It may still be where it was.
    """
    with database.write() as db:
        # A registration may have put it right since it was read.
        blob = directory.read(audio_sha256, AUDIO_KIND)
        if blob is not None:
            try:
                stored_audio.from_bytes(blob, audio_sha256)
            except SourceCorruptError:
                directory.set_aside(audio_sha256, AUDIO_KIND)
            else:
                return
        stored_files.remove(db, audio_sha256, [AUDIO_KIND])


def _discard(
    db: Connection, directory: StoreDirectory, audio_sha256: str, deletion_id: int
) -> None:
    stored = {file.kind for file in stored_files.of_audio(db, audio_sha256)}
    if AUDIO_KIND in stored or speakers.is_referenced(db, audio_sha256):
        # Somebody came with the same clip meanwhile: its files have rows.
        directory.remove(audio_sha256, directory.kinds(audio_sha256) - stored)
        directory.drop_quarantine(audio_sha256)
        return
    stored_files.remove(db, audio_sha256)
    directory.discard(audio_sha256, deletion_id)


def _remove_stock_file(directory: StoreDirectory, file: ImportedFile) -> None:
    path = directory.root / file.file_name
    with storage_errors(path), suppress(FileNotFoundError):
        stat = path.stat()
        # Another time or size: stock has written another voice there since.
        if (stat.st_mtime_ns, stat.st_size) == (file.mtime_ns, file.size):
            path.unlink()
            sync_directory(directory.root)
