"""Finishing deletions, and whatever else a process that was killed, or a disk, left."""

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable

from sqlalchemy import Connection

from vllm_tts_cache.catalogue import deletions, owners, schema, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.records import AUDIO_KIND, Segment
from vllm_tts_cache.catalogue.schema import slices
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import SourceCorruptError, StorageError, TTSCacheError
from vllm_tts_cache.store import audio_file
from vllm_tts_cache.store.blobs import BlobOwner, BucketOwner
from vllm_tts_cache.store.directory import StoreDirectory
from vllm_tts_cache.store.registering import remove_files

logger = logging.getLogger("vllm.vllm_tts_cache")

# Between two slices, so that whoever serves requests in this process gets to it.
_PAUSE_SECONDS = 0.001
# What lines of one kind differ in.
_DETAIL = re.compile(r"\b[0-9a-f]{64}: |\d+ ?")
_MAX_KINDS = 20


def recover_aside(recover: Callable[[], list[str]]) -> threading.Thread:
    """Recover on a thread that nobody waits for: it takes as long as there are files.

    What ``recover`` returns or raises is logged, in one line.
    """

    def run() -> None:
        try:
            _log(recover())
        except TTSCacheError as exc:
            logger.warning("Recovering the speaker storage: %s", exc)

    thread = threading.Thread(target=run, name="tts-cache-recover", daemon=True)
    thread.start()
    return thread


def _log(lines: list[str]) -> None:
    for line in lines:
        logger.debug("Recovered: %s.", line)
    # Of one kind there may be as many as there are files.
    kinds = Counter(_DETAIL.sub("", line).strip() for line in lines)
    if counted := [f"{num} x {kind}" for kind, num in kinds.most_common(_MAX_KINDS)]:
        logger.info("Recovered: %s.", "; ".join(counted))


class _Steps:
    """Steps of which each is done, whichever fail; `finish` raises the first error."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._errors: list[StorageError] = []

    def do(self, step: Callable[..., object], *args: object) -> None:
        try:
            done = step(*args)
            self._lines += done if isinstance(done, list) else []
        except StorageError as exc:
            self._errors.append(exc)
        time.sleep(_PAUSE_SECONDS)

    def finish(self) -> list[str]:
        if self._errors:
            raise self._errors[0]
        return self._lines


def recover(blobs: BlobOwner, database: Database) -> list[str]:
    """Bring directory and catalogue together; returns what was done, a line each.

    Raises: StorageError: Something could not be finished; what could be, is.
    """
    with database.read() as db:
        unfinished = deletions.unfinished(db)
        prefixes = {*blobs.files.prefixes(), *stored_files.prefixes(db)}
    steps = _Steps()
    for deletion in unfinished:
        steps.do(_finish, blobs, database, deletion)
    if isinstance(blobs, BucketOwner):
        steps.do(blobs.sweep)
    steps.do(_sweep_partials, blobs.files)
    for prefix in sorted(prefixes):
        steps.do(_reconcile, blobs, database, prefix)
    steps.do(blobs.files.empty_trash)
    steps.do(_put_rows_right, database)
    lines = steps.finish()
    database.backend.wipe_log()
    return lines


def recover_copies(directory: StoreDirectory, database: Database) -> list[str]:
    """Remove copies of what nobody has any more; returns what was done, a line each.

    For a machine that no API server recovers: it takes as long as there are copies,
    however many voices there are.

    Raises: StorageError: Something could not be finished; what could be, is.
    """
    steps = _Steps()
    steps.do(_sweep_partials, directory)
    for prefix in sorted(directory.prefixes()):
        steps.do(_delete_strays, directory, database, prefix)
    steps.do(directory.empty_trash)
    return steps.finish()


def _finish(blobs: BlobOwner, database: Database, deletion: Deletion) -> list[str]:
    remove_files(blobs, database, deletion)
    return [f"finished deletion {deletion.id}"]


def _sweep_partials(directory: StoreDirectory) -> list[str]:
    num_files = directory.sweep_partials()
    return [f"removed {num_files} half-written files"] if num_files else []


def _put_rows_right(database: Database) -> list[str]:
    with database.write() as db:
        deletions.delete_old(db)
    # First without the turn to write: of a million voices it takes seconds.
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
    """Remove files without a row and rows without a file, in one part."""
    directory = blobs.files
    found = {sha: directory.kinds(sha) for sha in directory.addresses(prefix)}
    known: dict[str, set[str]] = {}
    registered: set[str] = set()
    with database.read() as db:
        for row in stored_files.between(db, prefix, prefix + "g"):
            known.setdefault(row.audio_sha256, set()).add(row.kind)
            if row.segment is Segment.REGISTERED:
                registered.add(row.audio_sha256)
        unowned = registered - owners.owned(db, sorted(registered))
    differing = {
        sha for sha in found.keys() | known.keys() if found.get(sha) != known.get(sha)
    }
    settle = _settle
    if isinstance(blobs, BucketOwner):  # there a row without a file is as it should be
        differing = {sha for sha in found if found[sha] - known.get(sha, set())}
        settle = _settle_copies
    differing |= unowned
    return [
        line for sha in sorted(differing) for line in settle(directory, database, sha)
    ]


def _delete_strays(
    directory: StoreDirectory, database: Database, prefix: str
) -> list[str]:
    lines: list[str] = []
    for some in slices(directory.addresses(prefix)):
        found = {sha: directory.kinds(sha) for sha in some}
        with database.read() as db:
            stored = stored_files.kinds(db, some)
        for sha in some:
            if found[sha] - stored[sha]:
                lines += _settle_copies(directory, database, sha)
        time.sleep(_PAUSE_SECONDS)
    return lines


def _settle(directory: StoreDirectory, database: Database, sha: str) -> list[str]:
    """Compare again within a transaction, in which nobody moves a file."""
    lines: list[str] = []
    with database.write() as db:
        rows = {row.kind: row for row in stored_files.of_audio(db, sha)}
        is_owned = owners.is_owned(db, sha)
        unowned = {
            kind
            for kind, row in rows.items()
            if row.segment is Segment.REGISTERED and not is_owned
        }
        files = directory.kinds(sha)
        # What was registered keeps its row: the file may be away for a while only.
        kept = {AUDIO_KIND} if is_owned else set[str]()
        if missing := rows.keys() - files - kept:
            lines.append(
                f"{sha}: deleted the rows of {len(missing)} files that are not there"
            )
        stored_files.remove(db, sha, missing | unowned)
        orphans = (files - rows.keys()) | (unowned - missing)
        if is_owned and AUDIO_KIND in orphans and _restored(db, directory, sha):
            lines.append(f"{sha}: restored the audio of a voice that has no other")
            orphans.discard(AUDIO_KIND)
        if orphans:
            lines.append(f"{sha}: removed {len(orphans)} files that nobody has")
        schema.check_turn(db)
        directory.remove(sha, orphans)
    return lines


def _settle_copies(
    directory: StoreDirectory, database: Database, sha: str
) -> list[str]:
    """Remove copies without a row, and rows of what nobody registered any more."""
    lines: list[str] = []
    # Before the rows: who stores writes a row first, and then its copy.
    found = directory.kinds(sha)
    with database.write() as db:
        rows = {row.kind: row.segment for row in stored_files.of_audio(db, sha)}
        if Segment.REGISTERED in rows.values() and not owners.is_owned(db, sha):
            lines.append(
                f"{sha}: deleted the rows of {len(rows)} files that nobody has"
            )
            stored_files.remove(db, sha)
            rows = {}
    if orphans := found - rows.keys():
        lines.append(f"{sha}: removed {len(orphans)} copies that nobody has")
        directory.remove(sha, orphans)
    return lines


def _restored(db: Connection, directory: StoreDirectory, sha: str) -> bool:
    """Give audio its row again, whose file was away for a while, if it is whole."""
    blob = directory.read(sha, AUDIO_KIND)
    try:
        if blob is None:
            return False
        audio_file.from_bytes(blob, sha)
    except SourceCorruptError:
        return False
    file = StoredFile(
        audio_sha256=sha,
        kind=AUDIO_KIND,
        segment=Segment.REGISTERED,
        num_bytes=len(blob),
    )
    stored_files.put(db, file)
    return True
