"""What is wrong in the directory or in the catalogue. Nothing here writes."""

import time
from collections.abc import Iterator

from vllm_tts_cache.catalogue import deletions, owners, stored_files
from vllm_tts_cache.catalogue.catalogue import Catalogue
from vllm_tts_cache.catalogue.record import AUDIO_KIND, Segment
from vllm_tts_cache.errors import EncodingCorruptError, SourceCorruptError, StorageError
from vllm_tts_cache.store import stored_forms, takeover
from vllm_tts_cache.store.directory import StoreDirectory
from vllm_tts_cache.store.stored_forms import named

# What differs is looked at again so much later: somebody may be about to commit.
_SETTLE_SECONDS = 0.3


def problems(directory: StoreDirectory, catalogue: Catalogue) -> list[str]:
    """Read every file and row; one line for each thing that is wrong, in no order.

    Others may go on using the directory.

    Raises:
        StorageError: The catalogue or a directory could not be read.
    """
    found = [*catalogue.verify(), *_deletion_problems(directory, catalogue)]
    found += [f"left behind: {path}" for path in directory.leftovers()]
    if takeover.is_pending(directory.root):
        found.append("what an earlier version stored is not taken over: start a server")
    differing: list[str] = []
    for prefix in sorted({*directory.prefixes(), *_prefixes(catalogue)}):
        found += [f"misnamed: {path}" for path in directory.misplaced(prefix)]
        for sha in _addresses(directory, catalogue, prefix):
            if any(_differences(directory, catalogue, sha)):
                differing.append(sha)
            found += _corrupt(directory, sha)
    if differing:
        time.sleep(_SETTLE_SECONDS)
    for sha in differing:
        found += _differences(directory, catalogue, sha)
    return found


def _deletion_problems(directory: StoreDirectory, catalogue: Catalogue) -> list[str]:
    with catalogue.database.read() as db:
        unfinished = deletions.unfinished(db)
        addresses = directory.quarantined()
        stored = stored_files.kinds(db, addresses)
        owned = owners.owned(db, addresses)
    return [
        *(f"deletion {deletion.id}: not finished" for deletion in unfinished),
        *(
            f"audio {sha}: nobody has it, and some of it was set aside"
            for sha in addresses
            if not stored[sha] and sha not in owned
        ),
    ]


def _prefixes(catalogue: Catalogue) -> set[str]:
    with catalogue.database.read() as db:
        return stored_files.prefixes(db) | owners.audio_prefixes(db)


def _addresses(
    directory: StoreDirectory, catalogue: Catalogue, prefix: str
) -> list[str]:
    with catalogue.database.read() as db:
        rows = stored_files.between(db, prefix, prefix + "g")
        referenced = owners.audio_between(db, prefix, prefix + "g")
    found = set(directory.addresses(prefix))
    return sorted(found | referenced | {row.audio_sha256 for row in rows})


def _differences(
    directory: StoreDirectory, catalogue: Catalogue, sha: str
) -> Iterator[str]:
    with catalogue.database.snapshot() as db:
        rows = {row.kind: row for row in stored_files.of_audio(db, sha)}
        is_owned = owners.is_owned(db, sha)
        files = directory.kinds(sha)
    for kind in sorted(files - rows.keys()):
        yield f"audio {sha}: nobody has its {named(kind)}"
    for kind in sorted(rows.keys() - files):
        yield f"audio {sha}: its {named(kind)} is not there"
    if is_owned and AUDIO_KIND not in rows:
        yield f"audio {sha}: not stored"
    expected = Segment.REGISTERED if is_owned else Segment.INLINE
    for kind, row in sorted(rows.items()):
        if row.segment is not expected:
            yield f"audio {sha}: its {named(kind)} counts as {row.segment.value}"
        elif kind in files and directory.num_bytes(sha, kind) != row.num_bytes:
            yield f"audio {sha}: its {named(kind)} has not {row.num_bytes} bytes"


def _corrupt(directory: StoreDirectory, sha: str) -> Iterator[str]:
    for kind in sorted(directory.kinds(sha)):
        try:
            if (blob := directory.read(sha, kind)) is None:
                continue
            stored_forms.check(blob, sha, kind)
        except (EncodingCorruptError, SourceCorruptError) as exc:
            yield f"corrupt: {directory.file_name(sha, kind)}: {exc.reason}"
        except StorageError as exc:
            yield f"unreadable: {exc}"
