"""Files of one store in another, byte by byte, some at a time."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from vllm_tts_cache.catalogue import stored_files
from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.catalogue.row_copies import FILES, Pair, Row
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import EncodingCorruptError, SourceCorruptError, StorageError
from vllm_tts_cache.store import stored_forms
from vllm_tts_cache.store.blobs import Staged
from vllm_tts_cache.store.speaker_store import SpeakerStore

# In memory at a time, but for one file that is longer.
_BATCH_BYTES = 32 * 1024**2
_BATCH_FILES = 64
_NUM_THREADS = 4


class FileCopies:
    """Copies registered audio and its encodings, and compares them.

    Args:
        source: Only read.
        target: Of which nobody else makes use.
    """

    def __init__(self, source: SpeakerStore, target: SpeakerStore):
        self._source, self._target = source, target
        self._databases = source.catalogue.database, target.catalogue.database

    def copy(self) -> Iterator[tuple[int, int]]:
        """Copy what is missing; yields files that were looked at, and copied.

        Raises:
            StorageError: One cannot be read or written, or is damaged.
        """
        self._remove_stale()
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            for pairs in _batches(FILES.pairs(*self._databases)):
                missing = [pair[0] for pair in pairs if pair[0] and pair[1] is None]
                self._store(missing, list(threads.map(self._staged, missing)))
                yield len(pairs), len(missing)

    def compare(self) -> Iterator[tuple[int, list[str]]]:
        """Read both; yields files that were looked at, and what is wrong with them.

        A copy that differs is removed, so that the next run makes it again.

        Raises:
            StorageError: One cannot be read, or is damaged in the source.
        """
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            for pairs in _batches(FILES.pairs(*self._databases)):
                yield len(pairs), list(filter(None, threads.map(self._problem, pairs)))

    def _remove_stale(self) -> None:
        for pair in FILES.pairs(*self._databases):
            if pair[1] is not None and not FILES.is_same(pair):
                self._remove(pair[1])

    def _remove(self, row: Row) -> None:
        sha, kind = FILES.key_of(row)
        with self._databases[1].write() as db:
            stored_files.remove(db, sha, [kind])
            self._target.blobs.remove(db, sha, [kind])

    def _staged(self, row: Row) -> Staged:
        file = stored_file_of(row)
        data = self._read(row)
        _check(data, file)
        return self._target.blobs.stage(data, file.audio_sha256)

    def _store(self, rows: list[Row], staged: list[Staged]) -> None:
        if not rows:
            return
        blobs = self._target.blobs
        try:
            with self._databases[1].write() as db:
                for row, each in zip(rows, staged, strict=True):
                    sha, kind = FILES.key_of(row)
                    name = blobs.place(db, each, sha, kind)
                    file = replace(stored_file_of(row), object_name=name)
                    stored_files.put(db, file, row["used_at"])
                    stored_files.date(db, file, row["created_at"])
        finally:
            for each in staged:
                blobs.unstage(each)

    def _problem(self, pair: Pair) -> str | None:
        one, other = pair
        if one is None or other is None:
            return f"{_what(one or other or {})} is in one of the two only"
        data = self._read(one)
        copy = self._target.blobs.stored_bytes(stored_file_of(other))
        if copy == data:
            return None
        _check(data, stored_file_of(one))  # or it is the copy that is right
        self._remove(other)
        return f"{_what(one)} differs"

    def _read(self, row: Row) -> bytes:
        file = stored_file_of(row)
        data = self._source.blobs.stored_bytes(file)
        if data is None or len(data) != file.num_bytes:
            how = "not there" if data is None else "not as long as it should be"
            raise StorageError(
                f"{_what(row)} is {how} in the source, of which nothing was changed. "
                "`vllm-tts-cache verify --repair` mends it, or says what to do."
            )
        return data


def stored_file_of(row: Row) -> StoredFile:
    """What a row of `FILES` tells of."""
    return StoredFile(
        audio_sha256=row["audio_sha256"],
        kind=row["kind"],
        segment=Segment(row["segment"]),
        num_bytes=row["num_bytes"],
        object_name=row["object_name"],
    )


def _batches(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    batch: list[Pair] = []
    num_bytes = 0
    for pair in pairs:
        batch.append(pair)
        # What is there already is not read.
        num_bytes += 0 if pair[0] is None else pair[0]["num_bytes"]
        if len(batch) >= _BATCH_FILES or num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _check(data: bytes, file: StoredFile) -> None:
    sha = file.audio_sha256
    try:
        stored_forms.check(data, sha, file.kind)
    except (EncodingCorruptError, SourceCorruptError) as exc:
        raise StorageError(
            f"A file of audio {sha} in the source is damaged ({exc.reason}). Delete or "
            "register that voice again; `vllm-tts-cache verify` says which files are."
        ) from exc


def _what(row: Row) -> str:
    name = stored_forms.named(row.get("kind", ""))
    return f"audio {row.get('audio_sha256')}: its {name}"
