"""Where a reference stands in a prompt: in rows, one position each.

On Higgs Audio a row has a code of each codebook, each codebook's one row later than
those of the one before; on Audio8 TTS and Fish Speech a row is a frame.
"""

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_tts_cache.speaker.ref import SpeakerRef

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
