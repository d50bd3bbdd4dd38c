"""Compares rows, files and objects: `recover` makes them agree, `Verification` tells.

Both find what killed processes, failing disks and other programs left.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from sqlalchemy import Connection

from vllm_tts_cache.audio.reference import AUDIO, Segment
from vllm_tts_cache.catalogue import deletions, objects, owners, schema, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import (
    EncodingCorruptError,
    SourceCorruptError,
    StorageError,
    TTSCacheError,
)
from vllm_tts_cache.logs import logger
from vllm_tts_cache.store import binding, encoding
from vllm_tts_cache.store.blobs import BlobOwner, BucketOwner
from vllm_tts_cache.store.directory import StoreDirectory, key_of
from vllm_tts_cache.store.encoding import named
from vllm_tts_cache.store.registering import remove_files
from vllm_tts_cache.store.writer import Writer

# Between two slices, so that threads that serve requests can run.
_PAUSE_SECONDS = 0.001
# The parts in which lines of one kind differ.
_DETAIL = re.compile(r"\b[0-9a-f]{64}: |\d+ ?")
# Differences are checked again after this: a process may be about to commit.
_SETTLE_SECONDS = 0.3


def recover_aside(recover: Callable[[], list[str]]) -> threading.Thread:
    """Run ``recover`` on a daemon thread: it takes longer the more files there are.

    What it returns or raises is logged, in one line.
    """

    def run() -> None:
        try:
            lines = recover()
        except TTSCacheError as exc:
            logger.warning("Recovering the store failed: %s", exc)
            return
        for line in lines:
            logger.debug("Recovered: %s.", line)
        # There may be a line of one kind for each file.
        kinds = Counter(_DETAIL.sub("", line).strip() for line in lines).most_common(20)
        if kinds:
            counted = "; ".join(f"{num} x {kind}" for kind, num in kinds)
            logger.info("Recovered: %s.", counted)

    thread = threading.Thread(target=run, name="tts-cache-recover", daemon=True)
    thread.start()
    return thread


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

    def delete_strays(prefix: str) -> list[str]:
        strays = sorted(_strays(database, directory, prefix))
        settled = (_settle_copies(directory, database, sha) for sha in strays)
        return [line for lines in settled for line in lines]

    each = (partial(delete_strays, prefix) for prefix in directory.prefixes())
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
    if isinstance(blobs, BucketOwner):  # there most rows have no file
        settle, differing = _settle_copies, _strays(database, directory, prefix)
    else:
        settle, found = _settle, _artifacts(directory, prefix)
        known: dict[str, set[str]] = {}
        with database.read() as db:
            rows = stored_files.between(db, prefix, prefix + "g")
        for row in rows:
            known.setdefault(row.audio_sha256, set()).add(row.artifact)
        either = found.keys() | known.keys()
        differing = {sha for sha in either if found.get(sha) != known.get(sha)}
    with database.read() as db:
        differing |= stored_files.unowned(db, prefix, prefix + "g")
    settled = (settle(directory, database, sha) for sha in sorted(differing))
    return [line for lines in settled for line in lines]


def _artifacts(directory: StoreDirectory, prefix: str) -> dict[str, set[str]]:
    return {sha: directory.artifacts(sha) for sha in directory.addresses(prefix)}


def _strays(database: Database, directory: StoreDirectory, prefix: str) -> set[str]:
    """Return addresses under a prefix that have copies without a row."""
    # Listed before the rows: a writer commits a row before it writes the copy.
    found = _artifacts(directory, prefix)
    with database.read() as db:
        stored = stored_files.artifacts(db, list(found))
    return {sha for sha in found if found[sha] - stored[sha]}


def _settle(directory: StoreDirectory, database: Database, sha: str) -> list[str]:
    """Compare again in a write transaction, where no other process moves a file."""
    lines: list[str] = []
    with database.write() as db:
        rows = {row.artifact: row for row in stored_files.of_audio(db, sha)}
        is_owned = owners.is_owned(db, sha)
        registered = {a for a, row in rows.items() if row.segment is Segment.REGISTERED}
        unowned = set[str]() if is_owned else registered
        files = directory.artifacts(sha)
        # Registered audio keeps its row: its file may be missing for a while only.
        kept = {AUDIO} if is_owned else set[str]()
        if missing := rows.keys() - files - kept:
            what = f"{len(missing)} files that are not there"
            lines.append(f"{sha}: deleted the rows of {what}")
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
    found = directory.artifacts(sha)  # before the rows, as in `_strays`
    with database.write() as db:
        rows = {row.artifact: row.segment for row in stored_files.of_audio(db, sha)}
        if Segment.REGISTERED in rows.values() and not owners.is_owned(db, sha):
            what = f"{len(rows)} files without an owner"
            lines.append(f"{sha}: deleted the rows of {what}")
            stored_files.remove(db, sha)
            rows = {}
    if orphans := found - rows.keys():
        lines.append(f"{sha}: removed {len(orphans)} copies without a row")
        directory.remove(sha, orphans)
    return lines


def _restored(db: Connection, directory: StoreDirectory, sha: str) -> bool:
    """Write the row of an audio whose file is there again, if the file is whole."""
    blob = directory.read(sha, AUDIO) or b""
    segment, num_bytes = Segment.REGISTERED, len(blob)
    file = StoredFile(
        audio_sha256=sha, artifact=AUDIO, segment=segment, num_bytes=num_bytes
    )
    if is_whole := not _fault(blob, file):
        stored_files.put(db, file, None)
    return is_whole


class Verification:
    """Reads every row and its bytes; other processes may use the store meanwhile.

    Every method raises StorageError if the catalogue, the directory or the bucket
    cannot be read, and ConfigError if they do not belong together.
    """

    def __init__(self, database: Database, blobs: BlobOwner):
        self._files, self._database = blobs.files, database
        self._bucket = blobs.bucket if isinstance(blobs, BucketOwner) else None

    def problems(self) -> list[str]:
        """Return a line for each thing that is wrong, in no order."""
        if self._bucket is not None:
            binding.check_bucket(self._bucket, self._database)
        with self._database.read() as db:
            unfinished = deletions.unfinished(db)
            overdue = [] if self._bucket is None else objects.overdue(db)
        found = [f"deletion {each.id}: not finished" for each in unfinished]
        found += [f"left behind in the bucket: {name}" for name in overdue]
        found += [f"left behind: {path}" for path in self._files.leftovers()]
        differing: list[str] = []
        for prefix in self._prefixes():
            found += [f"misnamed: {path}" for path in self._files.misplaced(prefix)]
            if any(self._differences(prefix)):
                differing.append(prefix)
            rows = self._rows(prefix)
            for row in rows:
                place = self._files.file_name(row.audio_sha256, row.artifact)
                found += _faults(row.object_name or place, self._bytes, row)
            if self._bucket is not None:
                found += self._copies(prefix, rows)
        if differing:
            time.sleep(_SETTLE_SECONDS)
        for prefix in differing:
            found += self._differences(prefix)
        return found

    def repair(self, writer: Writer) -> list[str]:
        """Repair damaged and missing bytes; return a line for each file.

        An encoding is removed, to be made again. A bucket's audio is stored again from
        this machine's copy if that is whole. Other audio stays and counts as lost until
        the clip is registered again, or a machine with a copy repairs it.
        """
        lines: list[str] = []
        for prefix in self._prefixes():
            for row in self._rows(prefix):
                sha = row.audio_sha256
                try:
                    blob = self._bytes(row)
                    is_whole = blob is not None and not _fault(blob, row)
                except StorageError:  # unreadable, which need not be damaged
                    continue
                if row.artifact != AUDIO:
                    if not is_whole:
                        writer.remove(row)
                        lines.append(f"{sha}: removed a damaged {named(row.artifact)}")
                elif not is_whole and self._restore(row, writer):
                    lines.append(f"{sha}: restored the audio from this machine's copy")
                elif is_whole == row.is_suspect:
                    writer.suspect(sha, not is_whole)
        return lines

    def _restore(self, row: StoredFile, writer: Writer) -> bool:
        copy = None if self._bucket is None else self._copy(row)
        return copy is not None and not _fault(copy, row) and writer.restore(row, copy)

    def _bytes(self, row: StoredFile) -> bytes | None:
        if self._bucket is None:
            return self._copy(row)
        return self._bucket.get(str(row.object_name))

    def _copy(self, row: StoredFile) -> bytes | None:
        return self._files.read(row.audio_sha256, row.artifact)

    def _prefixes(self) -> list[str]:
        with self._database.read() as db:
            known = stored_files.prefixes(db) | owners.audio_prefixes(db)
        known.update(self._files.prefixes())
        if self._bucket is not None:
            known.update(self._bucket.folders(objects.FOLDER))
        return sorted(known)

    def _rows(self, prefix: str) -> list[StoredFile]:
        with self._database.read() as db:
            return stored_files.between(db, prefix, prefix + "g")

    def _differences(self, prefix: str) -> Iterator[str]:
        # A row that is added or removed meanwhile is in one of the two lists only.
        before = self._rows(prefix)
        sizes = self._sizes(prefix)
        after = self._rows(prefix)
        with self._database.read() as db:
            loose = set[str]() if self._bucket is None else objects.names(db)
            referenced = owners.audio_between(db, prefix, prefix + "g")
        for row in set(before) & set(after):
            name = _place(row)
            what = f"audio {row.audio_sha256}: its {named(row.artifact)}"
            if name not in sizes:
                yield f"{what} is not there"
            elif sizes[name] != row.num_bytes:
                yield f"{what} has not {row.num_bytes} bytes"
        for name in sizes.keys() - loose - {_place(row) for row in (*before, *after)}:
            if self._bucket is not None:
                yield f"the object {name} has no row"
            else:
                sha, _, artifact = name.partition("/")
                yield f"audio {sha}: its {named(artifact)} has no row"
        stored = {row.audio_sha256 for row in after if row.artifact == AUDIO}
        for sha in sorted(referenced - stored):
            yield f"audio {sha}: not stored"
        for row in after:
            is_owned = row.audio_sha256 in referenced
            if row.segment is not (Segment.REGISTERED if is_owned else Segment.INLINE):
                what = f"audio {row.audio_sha256}: its {named(row.artifact)}"
                yield f"{what} counts as {row.segment.value}"

    def _sizes(self, prefix: str) -> dict[str, int]:
        """Return name of an object, or ``address/artifact`` of a file -> bytes."""
        if self._bucket is not None:
            return dict(self._bucket.sizes(f"{objects.FOLDER}/{prefix}"))
        files = self._files.files(prefix)
        return {f"{sha}/{artifact}": stat.st_size for sha, artifact, stat in files}

    def _copies(self, prefix: str, rows: list[StoredFile]) -> Iterator[str]:
        stored = {(row.audio_sha256, row.artifact): row for row in rows}
        for sha, artifact, _ in self._files.files(prefix):
            if (row := stored.get((sha, artifact))) is None:
                yield f"audio {sha}: the copy of its {named(artifact)} has no row"
            else:
                place = self._files.file_name(sha, artifact)
                yield from _faults(place, self._copy, row)


def _place(row: StoredFile) -> str:
    return row.object_name or f"{row.audio_sha256}/{row.artifact}"


def _fault(blob: bytes, row: StoredFile) -> str | None:
    """Return what is wrong with the bytes of a row; None if they are right."""
    try:
        encoding.check(blob, key_of(row))
    except (EncodingCorruptError, SourceCorruptError) as exc:
        return exc.reason
    return None


def _faults(
    where: str, read: Callable[[StoredFile], bytes | None], row: StoredFile
) -> Iterator[str]:
    try:
        blob = read(row)
        if blob is not None and (reason := _fault(blob, row)):
            yield f"corrupt: {where}: {reason}"
    except StorageError as exc:
        yield f"unreadable: {exc.log_text}"
