"""Comparing rows, files and objects; nothing here changes one, but `repair`."""

import time
from collections.abc import Callable, Iterator

from vllm_tts_cache.catalogue import deletions, objects, owners, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.records import AUDIO_KIND, Segment
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import EncodingCorruptError, SourceCorruptError, StorageError
from vllm_tts_cache.store import audio_file, binding
from vllm_tts_cache.store.audio_file import named
from vllm_tts_cache.store.blobs import BlobOwner, BucketOwner
from vllm_tts_cache.store.writer import Writer

# What differs is looked at again so much later: a process may be about to commit.
_SETTLE_SECONDS = 0.3


class Verification:
    """Reads every row and its bytes; others may go on using them.

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
        prefixes = self._prefixes()
        differing: list[str] = []
        for prefix in prefixes:
            found += [f"misnamed: {path}" for path in self._files.misplaced(prefix)]
            if any(self._differences(prefix)):
                differing.append(prefix)
            rows = self._rows(prefix)
            for row in rows:
                place = self._files.file_name(row.audio_sha256, row.kind)
                found += _faults(row.object_name or place, self._bytes, row)
            if self._bucket is not None:
                found += self._copies(prefix, rows)
        if differing:
            time.sleep(_SETTLE_SECONDS)
        for prefix in differing:
            found += self._differences(prefix)
        return found

    def repair(self, writer: Writer) -> list[str]:
        """Put bytes right that are wrong or missing; return what was done, a line each.

        An encoding goes, and is made again. Of a bucket's audio this machine's copy is
        stored again if it is whole. Other audio stays as it is and counts as lost until
        the clip is registered again, or a machine with a copy repairs it.
        """
        lines: list[str] = []
        for prefix in self._prefixes():
            for row in self._rows(prefix):
                sha = row.audio_sha256
                try:
                    blob = self._bytes(row)
                    is_whole = blob is not None and not _fault(blob, row)
                except StorageError:  # a disk that cannot be read says nothing
                    continue
                if row.kind != AUDIO_KIND:
                    if not is_whole:
                        writer.remove(row)
                        lines.append(f"{sha}: removed a damaged {named(row.kind)}")
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
        return self._files.read(row.audio_sha256, row.kind)

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
        # The rows before and after: one of them has what came or went meanwhile.
        before = self._rows(prefix)
        sizes = self._sizes(prefix)
        after = self._rows(prefix)
        with self._database.read() as db:
            loose = set[str]() if self._bucket is None else objects.names(db)
            referenced = owners.audio_between(db, prefix, prefix + "g")
        for row in set(before) & set(after):
            name, what = _place(row), f"audio {row.audio_sha256}: its {named(row.kind)}"
            if name not in sizes:
                yield f"{what} is not there"
            elif sizes[name] != row.num_bytes:
                yield f"{what} has not {row.num_bytes} bytes"
        for name in sizes.keys() - loose - {_place(row) for row in (*before, *after)}:
            if self._bucket is not None:
                yield f"nobody has the object {name}"
            else:
                sha, _, kind = name.partition("/")
                yield f"audio {sha}: nobody has its {named(kind)}"
        yield from _segment_problems(after, referenced)

    def _sizes(self, prefix: str) -> dict[str, int]:
        """Object's name, or address and kind of a file -> bytes."""
        if self._bucket is not None:
            return dict(self._bucket.sizes(f"{objects.FOLDER}/{prefix}"))
        files = self._files.files(prefix)
        return {f"{sha}/{kind}": stat.st_size for sha, kind, stat in files}

    def _copies(self, prefix: str, rows: list[StoredFile]) -> Iterator[str]:
        stored = {(row.audio_sha256, row.kind): row for row in rows}
        for sha, kind, _ in self._files.files(prefix):
            if (row := stored.get((sha, kind))) is None:
                yield f"audio {sha}: nobody has the copy of its {named(kind)}"
            else:
                place = self._files.file_name(sha, kind)
                yield from _faults(place, self._copy, row)


def _place(row: StoredFile) -> str:
    return row.object_name or f"{row.audio_sha256}/{row.kind}"


def _fault(blob: bytes, row: StoredFile) -> str | None:
    """What is wrong with the bytes of a row; None if nothing is."""
    try:
        audio_file.check(blob, row.audio_sha256, row.kind)
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
    stored = {row.audio_sha256 for row in rows if row.kind == AUDIO_KIND}
    for sha in sorted(referenced - stored):
        yield f"audio {sha}: not stored"
    for row in rows:
        is_owned = row.audio_sha256 in referenced
        if row.segment is not (Segment.REGISTERED if is_owned else Segment.INLINE):
            name = named(row.kind)
            yield f"audio {row.audio_sha256}: its {name} counts as {row.segment.value}"
