"""The part of every budget that something counts against."""

from enum import Enum


class Segment(str, Enum):
    """Whose it is; each segment has its own part of every budget."""

    REGISTERED = "registered"
    INLINE = "inline"
