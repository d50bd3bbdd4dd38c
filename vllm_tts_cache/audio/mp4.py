"""A look at an MP4's index before FFmpeg believes it.

FFmpeg allocates tens of bytes for each packet that an index claims, and a claim costs
no bytes in the file: 17 KB made it take 2.4 GB. So the claims of all tracks and
fragments together are bounded here, in every box but the media data.
"""

from collections.abc import Iterator

from vllm_tts_cache.errors import InvalidAudioError

# Half an hour of AAC at 48 kHz; 30 s of anything have far fewer.
MAX_INDEX_ENTRIES = 100_000
_MAX_BOXES = 4096

_Span = tuple[int, int]


def check_index(data: bytes) -> None:
    """Refuse an index that claims more packets than any usable reference has.

    Raises:
        InvalidAudioError: It does, or the index is compressed (``cmov``), which hides
            what it claims.
    """
    spans = list(_index_spans(data))
    if any(data.find(b"cmov", *span) >= 0 for span in spans):
        raise InvalidAudioError("its MP4 index is compressed.")
    if (claimed := _claimed_entries(data, spans)) > MAX_INDEX_ENTRIES:
        raise InvalidAudioError(
            f"its MP4 index claims {claimed} packets; at most {MAX_INDEX_ENTRIES} are "
            "allowed."
        )


def _claimed_entries(data: bytes, spans: list[_Span]) -> int:
    """An upper bound on what FFmpeg makes of the index.

    Packets are counted by sample sizes and by fragments or, for PCM, by chunks; and
    every edit may list all of them once more.
    """
    counted = sum(_counts(data, spans, b"stsz", 12))
    counted += sum(_counts(data, spans, b"stz2", 12))
    counted += sum(_counts(data, spans, b"trun", 8))
    counted += sum(_counts(data, spans, b"stsc", 8))
    if counted > MAX_INDEX_ENTRIES:
        return counted  # before the chunk table, whose own length may be the lie
    chunks = sum(_counts(data, spans, b"stco", 8))
    chunks += sum(_counts(data, spans, b"co64", 8))
    edits = sum(_counts(data, spans, b"elst", 8))
    in_chunks = chunks * max(_chunk_lengths(data, spans), default=0)
    return max(counted, in_chunks) * max(edits, 1)


def _chunk_lengths(data: bytes, spans: list[_Span]) -> Iterator[int]:
    # An entry is the number of a first chunk, the packets in each, a description.
    for span in spans:
        for box in _find_all(data, b"stsc", span):
            last = min(_number(data, box + 8), (span[1] - box) // 12)
            for entry in range(last):
                yield _number(data, box + 16 + 12 * entry)


def _counts(
    data: bytes, spans: list[_Span], box_type: bytes, offset: int
) -> Iterator[int]:
    for span in spans:
        for box in _find_all(data, box_type, span):
            yield _number(data, box + offset)


def _index_spans(data: bytes) -> Iterator[_Span]:
    """Everything but the media data, whose bytes would look like boxes by chance."""
    start = 0
    # More are no file of anybody's, and each is looked through; the rest is one then.
    for _ in range(_MAX_BOXES):
        if start >= len(data):
            return
        size = _number(data, start)
        if size == 1:
            size = int.from_bytes(data[start + 8 : start + 16], "big")
        end = len(data) if size < 8 else min(len(data), start + size)
        if data[start + 4 : start + 8] != b"mdat":
            yield start, end
        start = end
    yield start, len(data)


def _find_all(data: bytes, box_type: bytes, span: _Span) -> Iterator[int]:
    start, end = span
    while (found := data.find(box_type, start, end)) >= 0:
        yield found
        start = found + len(box_type)


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")
