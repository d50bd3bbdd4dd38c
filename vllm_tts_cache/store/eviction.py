"""Keeps each segment within its bytes: which files go is a query."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_tts_cache.catalogue import stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.record import AUDIO_KIND, Segment
from vllm_tts_cache.store.blobs import Blobs

# Files that one transaction removes; others wait for it as long.
_SLICE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskBudgets:
    """The bytes that files may have.

    Attributes:
        audio: Of registered audio, of which one more is refused, and of inline audio,
            of which the least recently used goes.
        encodings: Of each segment's; the least recently used go.
    """

    audio: Mapping[Segment, int]
    encodings: Mapping[Segment, int]


def evict(
    database: Database,
    blobs: Blobs,
    segment: Segment,
    *,
    max_bytes: int,
    keep: tuple[str, str],
) -> int:
    """Remove the least recently used files of a segment that are too much.

    Args:
        database: The catalogue's.
        blobs: Where the bytes are.
        segment: Which to look at.
        max_bytes: What its files of the kind of ``keep`` may have.
        keep: Address and kind of the file that was just stored: it stays, even where
            it alone is larger. It says whether audio is evicted, or encodings.

    Raises:
        StorageError: Some were not removed.
    """
    with database.read() as db:
        used = stored_files.used(db, segment, is_audio=keep[1] == AUDIO_KIND)
    num_evicted = 0
    if used.num_bytes > max_bytes:
        while some := _evict_slice(database, blobs, segment, max_bytes, keep):
            num_evicted += some
    return num_evicted


def _evict_slice(
    database: Database,
    blobs: Blobs,
    segment: Segment,
    max_bytes: int,
    keep: tuple[str, str],
) -> int:
    is_audio = keep[1] == AUDIO_KIND
    num_evicted = 0
    with database.write() as db:
        used = stored_files.used(db, segment, is_audio=is_audio)
        excess = used.num_bytes - max_bytes
        for file in stored_files.oldest(
            db, segment, is_audio=is_audio, limit=_SLICE + 1
        ):
            if excess <= 0:
                break
            if (file.audio_sha256, file.kind) == keep:
                continue
            # The file first: a row without one is a miss, a file without a row would
            # stay until somebody looks for it.
            blobs.remove(db, file.audio_sha256, [file.kind])
            stored_files.remove(db, file.audio_sha256, [file.kind])
            excess -= file.num_bytes
            num_evicted += 1
    return num_evicted
