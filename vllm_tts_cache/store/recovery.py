"""Finishing what killed processes began."""

import time
from collections.abc import Callable, Iterator
from functools import partial

from vllm_tts_cache.catalogue import deletions, speakers, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.store import removal
from vllm_tts_cache.store.directory import StoreDirectory

# Between two slices, so that whoever serves requests in this process gets to it.
_PAUSE_SECONDS = 0.001
_QUARANTINE_MAX_BYTES = 64 * 1024**2


def recover(directory: StoreDirectory, database: Database) -> list[str]:
    """Bring directory and catalogue together; returns what was done, a line each.

    Raises:
        StorageError: Something could not be finished; what could be, is.
    """
    lines: list[str] = []
    errors: list[StorageError] = []
    for step in _steps(directory, database):
        try:
            lines += step()
        except StorageError as exc:  # it must not keep the others from being done
            errors.append(exc)
        time.sleep(_PAUSE_SECONDS)
    database.wipe_log()
    if errors:
        raise errors[0]
    return lines


def _steps(
    directory: StoreDirectory, database: Database
) -> Iterator[Callable[[], list[str]]]:
    with database.read() as db:
        unfinished = deletions.unfinished(db)
        prefixes = {*directory.prefixes(), *stored_files.prefixes(db)}
    for deletion in unfinished:
        yield partial(_finish, directory, database, deletion)
    yield partial(_sweep_partials, directory)
    for prefix in sorted(prefixes):
        yield partial(_reconcile, directory, database, prefix)
    yield partial(_empty_trash, directory)
    yield partial(_trim_quarantine, directory, database)
    yield partial(_put_rows_right, database)


def _finish(
    directory: StoreDirectory, database: Database, deletion: Deletion
) -> list[str]:
    removal.remove_files(directory, database, deletion)
    return [f"finished deletion {deletion.id}"]


def _sweep_partials(directory: StoreDirectory) -> list[str]:
    num_files = directory.sweep_partials()
    return [f"removed {num_files} half-written files"] if num_files else []


def _empty_trash(directory: StoreDirectory) -> list[str]:
    directory.empty_trash()
    return []


def _put_rows_right(database: Database) -> list[str]:
    with database.write() as db:
        deletions.drop_expired(db)
        problems = stored_files.usage_problems(db)
        if problems:
            stored_files.repair_usage(db)
    return problems


def _reconcile(directory: StoreDirectory, database: Database, prefix: str) -> list[str]:
    """Remove files without a row and rows without a file, in one part."""
    found = {sha: directory.kinds(sha) for sha in directory.addresses(prefix)}
    known: dict[str, set[str]] = {}
    registered: set[str] = set()
    with database.read() as db:
        for row in stored_files.between(db, prefix, prefix + "g"):
            known.setdefault(row.audio_sha256, set()).add(row.kind)
            if row.segment is Segment.REGISTERED:
                registered.add(row.audio_sha256)
        unowned = registered - speakers.referenced(db, sorted(registered))
    differing = {
        sha
        for sha in found.keys() | known.keys()
        if found.get(sha) != known.get(sha) or sha in unowned
    }
    return [
        line for sha in sorted(differing) for line in _settle(directory, database, sha)
    ]


def _settle(directory: StoreDirectory, database: Database, sha: str) -> list[str]:
    """Compare again within a transaction, in which nobody moves a file."""
    lines: list[str] = []
    with database.write() as db:
        rows = {row.kind: row for row in stored_files.of_audio(db, sha)}
        is_owned = speakers.is_referenced(db, sha)
        unowned = {
            kind
            for kind, row in rows.items()
            if row.segment is Segment.REGISTERED and not is_owned
        }
        files = directory.kinds(sha)
        if missing := rows.keys() - files:
            lines.append(f"{sha}: forgot {len(missing)} files that are not there")
        stored_files.remove(db, sha, missing | unowned)
        if orphans := (files - rows.keys()) | (unowned - missing):
            lines.append(f"{sha}: removed {len(orphans)} files that nobody has")
        directory.remove(sha, orphans)
    return lines


def _trim_quarantine(directory: StoreDirectory, database: Database) -> list[str]:
    """Keep what a failing disk did to voices that exist, and not too much of it."""
    addresses = directory.quarantined()
    with database.read() as db:
        stored = stored_files.kinds(db, addresses)
        owned = speakers.referenced(db, addresses)
    lines: list[str] = []
    num_bytes = 0
    for sha in addresses:
        num_bytes += directory.quarantined_bytes(sha)
        if num_bytes > _QUARANTINE_MAX_BYTES or not (stored[sha] or sha in owned):
            directory.drop_quarantine(sha)
            lines.append(f"{sha}: removed what was set aside")
    return lines
