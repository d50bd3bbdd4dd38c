"""What is wrong in the bucket, its copies or the catalogue. Nothing here writes."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_tts_cache.catalogue import deletions, objects, owners, stored_files
from vllm_tts_cache.catalogue.catalogue import Catalogue
from vllm_tts_cache.catalogue.record import AUDIO_KIND, Segment
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import EncodingCorruptError, SourceCorruptError, StorageError
from vllm_tts_cache.store import bucket_binding, stored_forms
from vllm_tts_cache.store.directory import StoreDirectory
from vllm_tts_cache.store.stored_forms import named

if TYPE_CHECKING:
    from vllm_tts_cache.store.bucket import Bucket

# What differs is looked at again so much later: somebody may be about to commit.
_SETTLE_SECONDS = 0.3


def problems(
    bucket: "Bucket", directory: StoreDirectory, catalogue: Catalogue
) -> list[str]:
    """Read every object, copy and row; one line for each thing that is wrong.

    Others may go on using them.

    Raises:
        StorageError: The catalogue or the bucket could not be read.
        ConfigError: They do not belong together.
    """
    bucket_binding.check(bucket, catalogue.database)
    found = [*catalogue.verify(), *_deletion_problems(catalogue)]
    found += [f"left behind: {path}" for path in directory.leftovers()]
    for prefix in sorted(_prefixes(bucket, directory, catalogue)):
        if set(_differences(bucket, catalogue, prefix)):
            time.sleep(_SETTLE_SECONDS)
            found += _differences(bucket, catalogue, prefix)
        for row in _rows(catalogue, prefix):
            found += _corrupt(bucket, row)
        found += _copy_problems(directory, catalogue, prefix)
    return found


def _deletion_problems(catalogue: Catalogue) -> list[str]:
    with catalogue.database.read() as db:
        unfinished = deletions.unfinished(db)
        due = objects.overdue(db)
    return [
        *(f"deletion {deletion.id}: not finished" for deletion in unfinished),
        *(f"left behind in the bucket: {name}" for name in due),
    ]


def _prefixes(
    bucket: "Bucket", directory: StoreDirectory, catalogue: Catalogue
) -> set[str]:
    with catalogue.database.read() as db:
        known = stored_files.prefixes(db) | owners.audio_prefixes(db)
    return known | {*directory.prefixes(), *bucket.folders(objects.FOLDER)}


def _rows(catalogue: Catalogue, prefix: str) -> list[StoredFile]:
    with catalogue.database.read() as db:
        return stored_files.between(db, prefix, prefix + "g")


def _differences(bucket: "Bucket", catalogue: Catalogue, prefix: str) -> Iterator[str]:
    # The rows before and after: what was stored or removed meanwhile is in one of them.
    before = _rows(catalogue, prefix)
    sizes = dict(bucket.sizes(f"{objects.FOLDER}/{prefix}"))
    after = {row.object_name: row for row in _rows(catalogue, prefix)}
    with catalogue.database.read() as db:
        loose = objects.names(db)
        referenced = owners.audio_between(db, prefix, prefix + "g")
    for row in before:
        if row.object_name in after and row.object_name not in sizes:
            yield f"audio {row.audio_sha256}: its {named(row.kind)} is not there"
        elif sizes.get(str(row.object_name), row.num_bytes) != row.num_bytes:
            name = named(row.kind)
            yield f"audio {row.audio_sha256}: its {name} has not {row.num_bytes} bytes"
    known = {row.object_name for row in before} | after.keys() | loose
    for name in sorted(sizes.keys() - known):
        yield f"nobody has the object {name}"
    yield from _segment_problems(list(after.values()), referenced)


def _segment_problems(rows: list[StoredFile], referenced: set[str]) -> Iterator[str]:
    stored = {row.audio_sha256 for row in rows if row.kind == AUDIO_KIND}
    for sha in sorted(referenced - stored):
        yield f"audio {sha}: not stored"
    for row in rows:
        is_owned = row.audio_sha256 in referenced
        if row.segment is not (Segment.REGISTERED if is_owned else Segment.INLINE):
            name = named(row.kind)
            yield f"audio {row.audio_sha256}: its {name} counts as {row.segment.value}"


def _corrupt(bucket: "Bucket", row: StoredFile) -> Iterator[str]:
    try:
        if (blob := bucket.get(str(row.object_name))) is not None:
            stored_forms.check(blob, row.audio_sha256, row.kind)
    except (EncodingCorruptError, SourceCorruptError) as exc:
        yield f"corrupt: {row.object_name}: {exc.reason}"
    except StorageError as exc:
        yield f"unreadable: {exc.log_text}"


def _copy_problems(
    directory: StoreDirectory, catalogue: Catalogue, prefix: str
) -> Iterator[str]:
    for path in directory.misplaced(prefix):
        yield f"misnamed: {path}"
    kinds = {sha: directory.kinds(sha) for sha in directory.addresses(prefix)}
    stored = {(row.audio_sha256, row.kind) for row in _rows(catalogue, prefix)}
    for sha, kind in sorted(
        (sha, kind) for sha, some in kinds.items() for kind in some
    ):
        if (sha, kind) not in stored:
            yield f"audio {sha}: nobody has the copy of its {named(kind)}"
            continue
        try:
            if (blob := directory.read(sha, kind)) is not None:
                stored_forms.check(blob, sha, kind)
        except (EncodingCorruptError, SourceCorruptError) as exc:
            yield f"corrupt: {directory.file_name(sha, kind)}: {exc.reason}"
