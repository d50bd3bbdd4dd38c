"""Where a reference stands in a prompt: in rows, one position each.

On Higgs Audio a row has a code of each codebook, each codebook's one row later than
those of the one before; on Audio8 TTS and Fish Speech a row is a frame. Codes are
looked at before a talker looks anything up by them.
"""

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.speaker.reference import SpeakerRef
from vllm_tts_cache.store.encoding import Array

FIELD = "tts_cache_reference_rows"  # in the host's additional_information


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRows:
    """Which positions of a prompt the reference's rows stand at.

    Attributes:
        start: The first one.
        num_rows: One position each.
        checksum: Of the ids before them. With the audio they are all that shapes the
            reference's KV, and the worker does not see them where that is found.
    """

    start: int
    num_rows: int
    checksum: int

    @classmethod
    def behind(cls, ids: Sequence[int], num_rows: int) -> "ReferenceRows":
        """Return where they stand if they follow these ids."""
        checksum = zlib.crc32(array("q", ids).tobytes())
        return cls(start=len(ids), num_rows=num_rows, checksum=checksum)

    def prefix(self, ref: SpeakerRef) -> str:
        """Name the prompt's KV up to the last of them."""
        return f"{ref.audio_sha256} {self.checksum}"

    def to_wire(self) -> list[int]:
        """Return plain integers, which survive the host's serialization."""
        return [self.start, self.num_rows, self.checksum]

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> "ReferenceRows":
        """Read the positions out of a request's additional information.

        Raises: ValueError if they are not there, or are not three counts.
        """
        match info.get(FIELD):
            case [int(start), int(num_rows), int(checksum)] if (
                min(start, num_rows, checksum) >= 0
            ):
                return cls(start=start, num_rows=num_rows, checksum=checksum)
            case other:
                raise ValueError(f"{FIELD} is not of three counts: {other!r:.60}")


def checked_codes(codes: Array, expected: tuple[int, int], codebook_size: int) -> Array:
    """Return them if they are what a prompt was made for, each inside its codebook.

    Args:
        codes: ``(num_frames, num_codebooks)`` integers.
        expected: That shape, as the prompt has room for it.
        codebook_size: Codes of one codebook.

    Raises: TTSCacheError; ValueError if there is none.
    """
    if codes.shape != expected:
        raise TTSCacheError(
            f"its codes are {codes.shape}, and its prompt was made for {expected}"
        )
    if codes.min() < 0 or codes.max() >= codebook_size:
        # On a GPU an index out of range would end the process.
        raise TTSCacheError("a code of it is outside of its codebook")
    return codes
