"""In which order encodings are made, by who waits for them."""

from enum import IntEnum

from vllm_tts_cache.catalogue.record import Segment


class Lane(IntEnum):
    """What goes first, on both sides of the RPC; within a lane, who came first.

    The last two take turns: inline clips that come without end may not hold up the
    voices that are registered meanwhile, nor thousands of those an inline clip.
    """

    URGENT = 0  # a request waits for a registered voice
    REGISTERED = 1  # no request waits: it may be one of thousands
    INLINE = 2  # a request waits for a clip of its own

    @classmethod
    def of(cls, segment: Segment, *, urgent: bool) -> "Lane":
        """Return the lane of what somebody wants encoded.

        Args:
            segment: Whose budget the encoding counts against.
            urgent: Whether a request waits, and not only a precompute.
        """
        if segment is Segment.INLINE:
            return cls.INLINE
        return cls.URGENT if urgent else cls.REGISTERED
