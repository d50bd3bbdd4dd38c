"""Taking over, in place, the directories of the version before this store.

    registry.sqlite3
    audio/v1/<segment>/ab/<audio_sha256>.safetensors
    encodings/v2/<segment>/ab/<audio_sha256>/<encoder_fingerprint>.safetensors

A file is renamed, and never read. Its row is committed before: killed at any point,
the next opening finds the files that are still at their old places, and goes on. The
registry goes last, because it is what says that there is something to take over.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from filelock import FileLock

from vllm_tts_cache.catalogue import (
    old_registry,
    owners,
    stored_files,
    tenant_usage,
)
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.record import AUDIO_KIND, Segment
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.files import (
    DIRECTORY_MODE,
    FILE_MODE,
    make_directory,
    storage_errors,
    sync_directory,
    sync_file_system,
)
from vllm_tts_cache.store.directory import (
    SUFFIX,
    StoreDirectory,
    remove_if_empty,
    remove_tree,
)
from vllm_tts_cache.store.encoding import is_address

logger = logging.getLogger("vllm.vllm_tts_cache")

_AUDIO, _ENCODINGS = Path("audio/v1"), Path("encodings/v2")
_DIRECTORIES = (
    *(Path("audio") / name for name in ("v1", "quarantine")),
    *(Path("encodings") / name for name in ("v1", "v2", "quarantine")),
    Path("locks"),
)
_LOCK = "takeover.lock"
_FILES = (
    _LOCK,
    "storage.lock",
    f"{old_registry.FILE_NAME}.lock",
    f"{old_registry.FILE_NAME}.import.lock",
    # After what they belong to: alone they say nothing.
    old_registry.FILE_NAME,
    f"{old_registry.FILE_NAME}-wal",
    f"{old_registry.FILE_NAME}-shm",
)
_PER_BATCH = 500
_LOG_INTERVAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OldFile:
    """A file at its old place."""

    path: Path
    audio_sha256: str
    kind: str
    segment: Segment
    num_bytes: int
    used_at: int


def is_pending(root: Path) -> bool:
    """Whether something of an earlier version is still there.

    Raises: OSError.
    """
    paths = [root / name for name in (*_DIRECTORIES, *_FILES)]
    return any(path.exists() for path in paths)


def take_over(directory: StoreDirectory, database: Database) -> None:
    """Take over what an earlier version left, if anything; processes take turns.

    Raises:
        StorageError: Some is not taken over; the next opening goes on.
    """
    root = directory.root
    with storage_errors(root):
        if not is_pending(root):
            return
        lock = root / _LOCK
        # For as long as it takes: without it there would be nothing to serve.
        with FileLock(lock, mode=FILE_MODE, is_singleton=False):
            if is_pending(root):
                _take_over(directory, database)
            lock.unlink(missing_ok=True)


def _take_over(directory: StoreDirectory, database: Database) -> None:
    root, began = directory.root, time.monotonic()
    logger.info("Taking over the voices that an earlier version stored in %s.", root)
    num_speakers = old_registry.take_over(root / old_registry.FILE_NAME, database)
    num_files, logged = 0, began
    files = _old_files(root)
    while batch := list(islice(files, _PER_BATCH)):
        num_files += _take_files(directory, database, batch)
        if time.monotonic() - logged > _LOG_INTERVAL_SECONDS:
            logged = time.monotonic()
            logger.info("Taking over: %d files so far.", num_files)
    with database.write() as db:
        tenant_usage.recount(db)
    # One call for all renames: one for each would take minutes.
    sync_file_system(root)
    _remove_old(root)
    seconds = time.monotonic() - began
    message = "Took over %d voices and %d files in %.1f s; nothing is encoded again."
    logger.info(message, num_speakers, num_files, seconds)


def _take_files(
    directory: StoreDirectory, database: Database, batch: list[OldFile]
) -> int:
    with database.write() as db:
        addresses = sorted({file.audio_sha256 for file in batch})
        referenced = owners.owned(db, addresses)
        # In the part of registered speakers and nobody's: a deletion was cut short.
        kept = [
            file
            for file in batch
            if file.audio_sha256 in referenced or file.segment is Segment.INLINE
        ]
        rows = [(_stored(file, referenced), file.used_at) for file in kept]
        stored_files.put_all(db, rows)
    for old, files in groupby(kept, key=lambda file: file.path.parent):
        _move(directory, old, list(files))
    return len(kept)


def _stored(file: OldFile, referenced: set[str]) -> StoredFile:
    is_registered = file.audio_sha256 in referenced
    return StoredFile(
        audio_sha256=file.audio_sha256,
        kind=file.kind,
        segment=Segment.REGISTERED if is_registered else Segment.INLINE,
        num_bytes=file.num_bytes,
    )


def _move(directory: StoreDirectory, old: Path, files: list[OldFile]) -> None:
    """Move files of one old directory to their places; their rows are committed."""
    target = directory.audio_directory(files[0].audio_sha256)
    make_directory(target.parent)
    names = {file.path.name for file in files}
    is_of_one_audio = files[0].kind != AUDIO_KIND and not target.exists()
    if is_of_one_audio and {path.name for path in old.iterdir()} == names:
        # As a whole: to make and to remove directories is most of the work.
        old.rename(target)
        target.chmod(DIRECTORY_MODE)
        for name in names:
            (target / name).chmod(FILE_MODE)
        return
    for file in files:
        _rename(file, Path(directory.file_name(file.audio_sha256, file.kind)))


def _rename(file: OldFile, target: Path) -> None:
    if target.exists():  # it was in both segments
        return
    make_directory(target.parent.parent)
    with suppress(FileExistsError):
        target.parent.mkdir(mode=DIRECTORY_MODE)
    file.path.rename(target)
    target.chmod(FILE_MODE)


def _old_files(root: Path) -> Iterator[OldFile]:
    # Encodings first: their directories become those of their audio.
    for segment in Segment:
        for audio in _entries(_entries_below(root / _ENCODINGS / segment.value)):
            for entry in _entries([audio]):
                name = audio.name + SUFFIX
                yield from _described(entry, name, entry.name, segment)
    for segment in Segment:
        for entry in _entries(_entries_below(root / _AUDIO / segment.value)):
            yield from _described(entry, entry.name, AUDIO_KIND + SUFFIX, segment)


def _described(
    entry: "os.DirEntry[str]", address: str, kind: str, segment: Segment
) -> Iterator[OldFile]:
    sha, kind = address.removesuffix(SUFFIX), kind.removesuffix(SUFFIX)
    is_named = is_address(sha) and (kind == AUDIO_KIND or is_address(kind))
    if not (is_named and entry.name.endswith(SUFFIX) and entry.is_file()):
        return
    stat = entry.stat()
    yield OldFile(
        path=Path(entry.path),
        audio_sha256=sha,
        kind=kind,
        segment=segment,
        num_bytes=stat.st_size,
        used_at=stat.st_mtime_ns // 1000,
    )


def _entries_below(path: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(path) as found:
            return sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _entries(
    directories: Iterable["os.DirEntry[str]"],
) -> Iterator["os.DirEntry[str]"]:
    # Listed before it is emptied: a directory that is renamed out of while it is read
    # may show a name twice, or not at all.
    for directory in directories:
        yield from _entries_below(Path(directory.path))


def _remove_old(root: Path) -> None:
    for name in _DIRECTORIES:
        remove_tree(root / name)
        if name.parent != Path():
            remove_if_empty(root / name.parent)
    for name in _FILES:
        (root / name).unlink(missing_ok=True)
    sync_directory(root)
