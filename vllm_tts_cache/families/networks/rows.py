"""Where a reference stands in a prompt: in rows, one position each.

On Higgs Audio a row has a code of each codebook, each codebook's one row later than
those of the one before; on Audio8 TTS a row is a frame.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIELD = "tts_cache_reference_rows"  # in the host's additional_information


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRows:
    """Which positions of a prompt the reference's rows stand at.

    Attributes:
        start: The first one.
        num_rows: One position each.
    """

    start: int
    num_rows: int

    def to_wire(self) -> list[int]:
        """Return plain integers, which survive the host's serialization."""
        return [self.start, self.num_rows]

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> "ReferenceRows":
        """Read the positions out of a request's additional information.

        Raises: ValueError if they are not there, or are not two counts.
        """
        match info.get(FIELD):
            case [int(start), int(num_rows)] if min(start, num_rows) >= 0:
                return cls(start=start, num_rows=num_rows)
            case other:
                raise ValueError(f"{FIELD} does not hold two counts but {other!r:.60}")
