"""What callers of one process wait for: who wants which encoding, and how that ends."""

import asyncio
import heapq
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.entrypoints.executors import RETRY_AFTER_SECONDS
from vllm_tts_cache.errors import (
    EncodeError,
    EncodeTimeoutError,
    ServerBusyError,
    TTSCacheError,
)
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.store.encoding import EncodingKey


class GoneError(EncodeError):
    """What a request was to speak with went while it was prepared: resolve it again."""


class AudioGoneError(GoneError):
    """The reference audio is not stored (any more): whoever has it may store it."""

    def __init__(self, audio_sha256: str):
        super().__init__("The reference audio is not stored (any more).")
        self.audio_sha256 = audio_sha256


class _Rank(IntEnum):
    URGENT = 0  # a request waits for a registered voice
    REGISTERED = 1
    INLINE = 2  # never before a registered voice, whoever waits


@dataclass(slots=True, kw_only=True, eq=False)
class Want:
    """One encoding that callers of this process wait for.

    Attributes:
        landed: Done when the encoding exists, or cannot be had.
        force_id: Names an encode that is done although the encoding exists.
        number: Who came first.
        since: When its deadline began to run, in monotonic seconds.
        is_told: Whether a worker knows of it as it is now.
        is_doubted: Whether only a worker's word counts: the catalogue may be wrong.
        is_looked_up: Whether the catalogue was asked for it by name.
        is_encoding: Whether the encode thread had it in hand, when asked last.
    """

    key: EncodingKey
    encoder: str
    segment: Segment
    number: int
    since: float
    landed: "asyncio.Future[None]"
    force_id: str = ""
    num_waiting: int = 0
    num_urgent: int = 0
    is_told: bool = False
    is_doubted: bool = False
    is_looked_up: bool = False
    is_encoding: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first."""
        return self.rank, self.number

    @property
    def rank(self) -> int:
        """The lane that it waits in."""
        if self.segment is Segment.INLINE:
            return _Rank.INLINE
        return _Rank.URGENT if self.num_urgent else _Rank.REGISTERED

    def join(
        self, segment: Segment, *, urgent: bool, force: bool, is_doubted: bool
    ) -> None:
        """Count one more who waits, and take in what that one asks for."""
        before = self.to_wire()
        self.num_waiting += 1
        self.num_urgent += urgent
        self.is_doubted |= is_doubted
        if segment is Segment.REGISTERED:
            self.segment = segment
        if force and not self.force_id:
            self.force_id = uuid.uuid4().hex
        self.is_told &= before == self.to_wire()

    def to_wire(self) -> wire.Want:
        """Return what a worker is told."""
        return wire.Want(
            audio_sha256=self.key.audio_sha256,
            encoder=self.encoder,
            segment=self.segment.value,
            urgent=self.num_urgent > 0,
            force_id=self.force_id,
        )


class Wants:
    """All wants of a process, one a key. For the event loop only.

    Args:
        max_inline: Inline wants at once; one more is refused.
    """

    def __init__(self, max_inline: int):
        self._max_inline = max_inline
        self._wants: dict[EncodingKey, Want] = {}
        self._num_made = 0

    def __len__(self) -> int:
        """Encodings that are waited for."""
        return len(self._wants)

    def __iter__(self) -> Iterator[Want]:
        return iter(self._wants.values())

    def __contains__(self, key: EncodingKey) -> bool:
        """Tell whether anybody waits for this encoding."""
        return key in self._wants

    def get(self, key: EncodingKey) -> Want | None:
        """Return the key's want, if anybody waits for it."""
        return self._wants.get(key)

    def of(self, key: EncodingKey, encoder: str, segment: Segment) -> Want:
        """Return the key's want, a new one if nobody waits for it yet.

        Raises: ServerBusyError.
        """
        if (want := self._wants.get(key)) is not None:
            return want
        if segment is Segment.INLINE:
            waiting = [w for w in self._wants.values() if w.segment is segment]
            if len(waiting) >= self._max_inline:
                raise too_many_inline()
        self._num_made += 1
        want = Want(
            key=key,
            encoder=encoder,
            segment=segment,
            number=self._num_made,
            since=time.monotonic(),
            landed=asyncio.get_running_loop().create_future(),
        )
        self._wants[key] = want
        return want

    def first(self, num: int) -> list[Want]:
        """Return so many of those that go first, in their order."""
        wants = self._wants.values()
        return heapq.nsmallest(num, wants, key=lambda want: want.order)

    def leave(self, want: Want, *, urgent: bool) -> None:
        """Count one less who waits; with the last one the want ends."""
        want.num_waiting -= 1
        want.num_urgent -= urgent
        if want.num_waiting == 0:
            self._drop(want)

    def land(self, want: Want) -> None:
        """End a want whose encoding exists."""
        self._drop(want)
        if not want.landed.done():
            want.landed.set_result(None)

    def fail(self, want: Want, error: TTSCacheError) -> None:
        """End a want whose encoding cannot be had."""
        self._drop(want)
        if not want.landed.done():
            want.landed.set_exception(error)
            want.landed.exception()  # the callers may all have left

    def fail_all(self, error: TTSCacheError) -> None:
        """End every want."""
        for want in list(self._wants.values()):
            self.fail(want, error)

    def _drop(self, want: Want) -> None:
        # Others may want the same by now, after all who waited for this one left.
        if self._wants.get(want.key) is want:
            del self._wants[want.key]


def too_many_inline() -> ServerBusyError:
    """Why an inline want is refused, here or by a worker."""
    return ServerBusyError(
        "too many inline references wait to be encoded", RETRY_AFTER_SECONDS
    )


def shutting_down() -> ServerBusyError:
    """Why wants end when the server does."""
    return ServerBusyError("it is shutting down", RETRY_AFTER_SECONDS)


def timed_out(seconds: float) -> EncodeTimeoutError:
    """Why a want ends that nobody gets on with."""
    return EncodeTimeoutError(
        f"The reference audio was not encoded within {seconds:g} s; it may still be "
        "under way. Try again, or raise SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS."
    )
