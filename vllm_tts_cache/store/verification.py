"""Compares rows, files and objects; only `repair` changes any."""

import time
from collections.abc import Callable, Iterator

from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.catalogue import deletions, objects, owners, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.records import AUDIO
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import EncodingCorruptError, SourceCorruptError, StorageError
from vllm_tts_cache.store import audio_file, binding
from vllm_tts_cache.store.audio_file import named
from vllm_tts_cache.store.blobs import BlobOwner, BucketOwner
from vllm_tts_cache.store.directory import key_of
from vllm_tts_cache.store.writer import Writer

# Differences are checked again after this: a process may be about to commit.
_SETTLE_SECONDS = 0.3


class Verification:
    """Reads every row and its bytes; other processes may use the store meanwhile.

    Every method raises StorageError if the catalogue, the directory or the bucket
    cannot be read, and ConfigError if they do not belong together.
    """

    def __init__(self, database: Database, blobs: BlobOwner):
        self._files = blobs.files
        self._database = database
        self._bucket = blobs.bucket if isinstance(blobs, BucketOwner) else None

    def problems(self) -> list[str]:
        """Return a line for each thing that is wrong, in no order."""
        if self._bucket is not None:
            binding.check_bucket(self._bucket, self._database)
        found = [*self._unfinished()]
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
        if self._bucket is None:
            return False
        copy = self._copy(row)
        return copy is not None and not _fault(copy, row) and writer.restore(row, copy)

    def _bytes(self, row: StoredFile) -> bytes | None:
        if self._bucket is None:
            return self._copy(row)
        return self._bucket.get(str(row.object_name))

    def _copy(self, row: StoredFile) -> bytes | None:
        return self._files.read(row.audio_sha256, row.artifact)

    def _unfinished(self) -> Iterator[str]:
        with self._database.read() as db:
            for deletion in deletions.unfinished(db):
                yield f"deletion {deletion.id}: not finished"
            if self._bucket is not None:
                for name in objects.overdue(db):
                    yield f"left behind in the bucket: {name}"

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
        yield from _segment_problems(after, referenced)

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
        audio_file.check(blob, key_of(row))
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


def _segment_problems(rows: list[StoredFile], referenced: set[str]) -> Iterator[str]:
    stored = {row.audio_sha256 for row in rows if row.artifact == AUDIO}
    for sha in sorted(referenced - stored):
        yield f"audio {sha}: not stored"
    for row in rows:
        is_owned = row.audio_sha256 in referenced
        if row.segment is not (Segment.REGISTERED if is_owned else Segment.INLINE):
            name = named(row.artifact)
            yield f"audio {row.audio_sha256}: its {name} counts as {row.segment.value}"
