"""Finishes deletions, and repairs what killed processes and failing disks left."""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from sqlalchemy import Connection

from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.catalogue import deletions, owners, schema, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.records import AUDIO
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import SourceCorruptError, StorageError, TTSCacheError
from vllm_tts_cache.logs import logger
from vllm_tts_cache.store import audio_file
from vllm_tts_cache.store.blobs import BlobOwner, BucketOwner
from vllm_tts_cache.store.directory import StoreDirectory, key_of
from vllm_tts_cache.store.registering import remove_files

# Between two slices, so that threads that serve requests can run.
_PAUSE_SECONDS = 0.001
# The parts in which lines of one kind differ.
_DETAIL = re.compile(r"\b[0-9a-f]{64}: |\d+ ?")
_MAX_KINDS = 20


def recover_aside(recover: Callable[[], list[str]]) -> threading.Thread:
    """Run ``recover`` on a daemon thread: it takes longer the more files there are.

    What it returns or raises is logged, in one line.
    """

    def run() -> None:
        try:
            _log(recover())
        except TTSCacheError as exc:
            logger.warning("Recovering the store failed: %s", exc)

    thread = threading.Thread(target=run, name="tts-cache-recover", daemon=True)
    thread.start()
    return thread


def _log(lines: list[str]) -> None:
    for line in lines:
        logger.debug("Recovered: %s.", line)
    # There may be a line of one kind for each file.
    kinds = Counter(_DETAIL.sub("", line).strip() for line in lines)
    if counted := [f"{num} x {kind}" for kind, num in kinds.most_common(_MAX_KINDS)]:
        logger.info("Recovered: %s.", "; ".join(counted))


def _all_done(steps: Iterable[Callable[[], object]]) -> list[str]:
    """Do every step even if others fail; return the lines that some of them return.

    Raises: StorageError: The first one, after the last step.
    """
    lines: list[str] = []
    failed: StorageError | None = None
    for step in steps:
        try:
            done = step()
            lines += done if isinstance(done, list) else []
        except StorageError as exc:
            failed = failed or exc
        time.sleep(_PAUSE_SECONDS)
    if failed is not None:
        raise failed
    return lines


def recover(blobs: BlobOwner, database: Database) -> list[str]:
    """Make directory and catalogue agree; return a line for each thing that was done.

    Raises: StorageError: A step failed; the others were done.
    """
    with database.read() as db:
        unfinished = deletions.unfinished(db)
        prefixes = {*blobs.files.prefixes(), *stored_files.prefixes(db)}
    steps: list[Callable[[], object]] = []
    steps += [partial(_finish, blobs, database, each) for each in unfinished]
    if isinstance(blobs, BucketOwner):
        steps.append(blobs.sweep)
    steps.append(partial(_sweep_partials, blobs.files))
    steps += [partial(_reconcile, blobs, database, each) for each in sorted(prefixes)]
    steps += [blobs.files.empty_trash, partial(_repair_rows, database)]
    lines = _all_done(steps)
    database.backend.wipe_log()
    return lines


def recover_copies(directory: StoreDirectory, database: Database) -> list[str]:
    """Remove copies without a row; return a line for each thing that was done.

    For a machine without an API server: its time depends on the number of copies, not
    of voices.

    Raises: StorageError: A step failed; the others were done.
    """
    strays = partial(_delete_strays, directory, database)
    each = (partial(strays, prefix) for prefix in sorted(directory.prefixes()))
    sweep = partial(_sweep_partials, directory)
    return _all_done((sweep, *each, directory.empty_trash))


def _finish(blobs: BlobOwner, database: Database, deletion: Deletion) -> list[str]:
    remove_files(blobs, database, deletion)
    return [f"finished deletion {deletion.id}"]


def _sweep_partials(directory: StoreDirectory) -> list[str]:
    num_files = directory.sweep_partials()
    return [f"removed {num_files} half-written files"] if num_files else []


def _repair_rows(database: Database) -> list[str]:
    with database.write() as db:
        deletions.delete_old(db)
    # Read first without the write lock: with a million voices it takes seconds.
    with database.snapshot() as db:
        if not _wrong_sums(db):
            return []
    with database.write_long() as db:
        wrong = _wrong_sums(db)
        stored_files.repair_usage(db)
        owners.recount(db)
    return wrong


def _wrong_sums(db: Connection) -> list[str]:
    return stored_files.usage_problems(db) + owners.problems(db)


def _reconcile(blobs: BlobOwner, database: Database, prefix: str) -> list[str]:
    """Remove files without a row and rows without a file, under one prefix."""
    directory = blobs.files
    found = {sha: directory.artifacts(sha) for sha in directory.addresses(prefix)}
    known: dict[str, set[str]] = {}
    settle = _settle
    with database.read() as db:
        differing = stored_files.unowned(db, prefix, prefix + "g")
        if isinstance(blobs, BucketOwner):  # there most rows have no file
            stored, settle = stored_files.artifacts(db, list(found)), _settle_copies
            differing |= {sha for sha in found if found[sha] - stored[sha]}
        else:
            for row in stored_files.between(db, prefix, prefix + "g"):
                known.setdefault(row.audio_sha256, set()).add(row.artifact)
            either = found.keys() | known.keys()
            differing |= {sha for sha in either if found.get(sha) != known.get(sha)}
    return [
        line for sha in sorted(differing) for line in settle(directory, database, sha)
    ]


def _delete_strays(
    directory: StoreDirectory, database: Database, prefix: str
) -> list[str]:
    found = {sha: directory.artifacts(sha) for sha in directory.addresses(prefix)}
    with database.read() as db:
        stored = stored_files.artifacts(db, list(found))
    strays = [sha for sha in found if found[sha] - stored[sha]]
    return [line for sha in strays for line in _settle_copies(directory, database, sha)]


def _settle(directory: StoreDirectory, database: Database, sha: str) -> list[str]:
    """Compare again in a write transaction, where no other process moves a file."""
    lines: list[str] = []
    with database.write() as db:
        rows = {row.artifact: row for row in stored_files.of_audio(db, sha)}
        is_owned = owners.is_owned(db, sha)
        unowned = {
            artifact
            for artifact, row in rows.items()
            if row.segment is Segment.REGISTERED and not is_owned
        }
        files = directory.artifacts(sha)
        # Registered audio keeps its row: its file may be missing for a while only.
        kept = {AUDIO} if is_owned else set[str]()
        if missing := rows.keys() - files - kept:
            lines.append(
                f"{sha}: deleted the rows of {len(missing)} files that are not there"
            )
        stored_files.remove(db, sha, missing | unowned)
        orphans = (files - rows.keys()) | (unowned - missing)
        if is_owned and AUDIO in orphans and _restored(db, directory, sha):
            lines.append(f"{sha}: restored the audio of a voice that has no other")
            orphans.discard(AUDIO)
        if orphans:
            lines.append(f"{sha}: removed {len(orphans)} files without a row")
        schema.check_turn(db)
        directory.remove(sha, orphans)
    return lines


def _settle_copies(
    directory: StoreDirectory, database: Database, sha: str
) -> list[str]:
    """Remove copies without a row, and rows of registered audio without an owner."""
    lines: list[str] = []
    # Listed before the rows: a writer commits a row before it writes the copy.
    found = directory.artifacts(sha)
    with database.write() as db:
        rows = {row.artifact: row.segment for row in stored_files.of_audio(db, sha)}
        if Segment.REGISTERED in rows.values() and not owners.is_owned(db, sha):
            lines.append(
                f"{sha}: deleted the rows of {len(rows)} files without an owner"
            )
            stored_files.remove(db, sha)
            rows = {}
    if orphans := found - rows.keys():
        lines.append(f"{sha}: removed {len(orphans)} copies without a row")
        directory.remove(sha, orphans)
    return lines


def _restored(db: Connection, directory: StoreDirectory, sha: str) -> bool:
    """Write the row of an audio whose file is there again, if the file is whole."""
    blob = directory.read(sha, AUDIO)
    if blob is None:
        return False
    file = StoredFile(
        audio_sha256=sha,
        artifact=AUDIO,
        segment=Segment.REGISTERED,
        num_bytes=len(blob),
    )
    try:
        audio_file.from_bytes(blob, key_of(file))
    except SourceCorruptError:
        return False
    stored_files.put(db, file, None)
    return True
