"""What callers of one process wait for: who wants which encoding, and how that ends."""

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain, islice, zip_longest

from vllm_tts_cache.catalogue.records import Segment
from vllm_tts_cache.entrypoints.speakers.executors import RETRY_AFTER_SECONDS
from vllm_tts_cache.errors import (
    EncodeError,
    EncodeTimeoutError,
    ServerBusyError,
    TTSCacheError,
)
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.speaker.reference import Lane
from vllm_tts_cache.store.encoding import EncodingKey

# What goes while a prompt is made is resolved anew, as often as a request is submitted.
MAX_TRIES = 3


class GoneError(EncodeError):
    """What a request was to speak with went while it was prepared: resolve it again."""


class AudioGoneError(GoneError):
    """The reference audio is not stored (any more): whoever has it may store it."""

    def __init__(self, audio_sha256: str):
        super().__init__("The reference audio is not stored (any more).")
        self.audio_sha256 = audio_sha256


class SpeakerReplacedError(GoneError):
    """Another clip was registered under the voice's name meanwhile (503).

    Attributes:
        retry_after_seconds: When it is worth trying again.
    """

    http_status = HTTPStatus.SERVICE_UNAVAILABLE

    retry_after_seconds = RETRY_AFTER_SECONDS

    def __init__(self, name: str):
        super().__init__(
            f"Voice {name!r} is being replaced: each time that its encodings were "
            "there for this request, it had another clip. Try again in "
            f"{self.retry_after_seconds} s, when that is over."
        )
        self.name = name

    @property
    def log_text(self) -> str:
        """The message without the name."""
        return "A voice was replaced each time that a request had its encodings."


@dataclass(slots=True, kw_only=True, eq=False)
class Want:
    """One encoding that callers of this process wait for.

    Attributes:
        landed: Done when the encoding exists, or cannot be had.
        force_id: Names an encode that is done although the encoding exists.
        since: When its deadline began to run, in monotonic seconds.
        is_told: Whether a worker knows of it as it is now.
        is_doubted: Whether only a worker's word counts: the catalogue may be wrong.
        is_encoding: Whether the encode thread had it in hand, when asked last.
    """

    key: EncodingKey
    encoder: str
    segment: Segment
    since: float
    landed: "asyncio.Future[None]"
    force_id: str = ""
    num_waiting: int = 0
    num_urgent: int = 0
    is_told: bool = False
    is_doubted: bool = False
    is_encoding: bool = False

    @property
    def lane(self) -> Lane:
        """Where it waits, by who waits for it."""
        return Lane.of(self.segment, urgent=self.num_urgent > 0)

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

    There may be very many, and they are looked at very often: nothing but `__iter__`
    and `fail_all` goes through all of them.

    Args:
        max_inline: Inline wants at once; one more is refused.
    """

    def __init__(self, max_inline: int):
        self._max_inline = max_inline
        self._wants: dict[EncodingKey, Want] = {}
        self._lanes: dict[Lane, OrderedDict[EncodingKey, Want]] = {
            lane: OrderedDict() for lane in Lane
        }
        self._new: list[Want] = []

    def __len__(self) -> int:
        """Encodings that are waited for."""
        return len(self._wants)

    def __iter__(self) -> Iterator[Want]:
        return iter(self._wants.values())

    def __contains__(self, key: EncodingKey) -> bool:
        """Tell whether anybody waits for this encoding."""
        return key in self._wants

    @property
    def is_full(self) -> bool:
        """Whether as many inline ones wait as may."""
        return len(self._lanes[Lane.INLINE]) >= self._max_inline

    def get(self, key: EncodingKey) -> Want | None:
        """Return the key's want, if anybody waits for it."""
        return self._wants.get(key)

    def join(
        self,
        key: EncodingKey,
        encoder: str,
        segment: Segment,
        *,
        urgent: bool,
        force: bool,
        is_doubted: bool,
    ) -> Want:
        """Return the key's want with one more who waits, if need be a new one.

        Raises: ServerBusyError.
        """
        if (want := self._wants.get(key)) is None:
            want = self._new_one(key, encoder, segment)
        want.join(segment, urgent=urgent, force=force, is_doubted=is_doubted)
        self._place(want)
        return want

    def take_new(self) -> list[Want]:
        """Return those that came since the last call."""
        new, self._new = self._new, []
        return new

    def first(self, num: int) -> list[Want]:
        """Return so many of those that go first, in their order.

        As in a worker, those of the last two lanes take turns.
        """
        urgent, *others = (lane.values() for lane in self._lanes.values())
        in_turn = filter(None, chain.from_iterable(zip_longest(*others)))
        return list(islice(chain(urgent, in_turn), num))

    def leave(self, want: Want, *, urgent: bool) -> None:
        """Count one less who waits; with the last one the want ends."""
        want.num_waiting -= 1
        want.num_urgent -= urgent
        if want.num_waiting == 0:
            self._delete(want)
        elif self._wants.get(want.key) is want:
            self._place(want)

    def land(self, want: Want) -> None:
        """End a want whose encoding exists."""
        self._delete(want)
        if not want.landed.done():
            want.landed.set_result(None)

    def fail(self, want: Want, error: TTSCacheError) -> None:
        """End a want whose encoding cannot be had."""
        self._delete(want)
        if not want.landed.done():
            want.landed.set_exception(error)
            want.landed.exception()  # the callers may all have left

    def fail_all(self, error: TTSCacheError) -> None:
        """End every want."""
        for want in list(self._wants.values()):
            self.fail(want, error)

    def _delete(self, want: Want) -> None:
        # Others may want the same by now, after all who waited for this one left.
        if self._wants.get(want.key) is want:
            del self._wants[want.key]
            self._take_out(want.key)

    def _new_one(self, key: EncodingKey, encoder: str, segment: Segment) -> Want:
        if segment is Segment.INLINE and self.is_full:
            raise too_many_inline()
        want = Want(
            key=key,
            encoder=encoder,
            segment=segment,
            since=time.monotonic(),
            landed=asyncio.get_running_loop().create_future(),
        )
        self._wants[key] = want
        self._new.append(want)
        return want

    def _place(self, want: Want) -> None:
        """Put a want at the end of its lane, if it is not in it yet."""
        lane = self._lanes[want.lane]
        if want.key not in lane:
            self._take_out(want.key)
            lane[want.key] = want

    def _take_out(self, key: EncodingKey) -> None:
        for lane in self._lanes.values():
            lane.pop(key, None)


def too_many_inline() -> ServerBusyError:
    """Why an inline want is refused, here or by a worker."""
    return ServerBusyError(
        "too many inline references wait to be encoded", RETRY_AFTER_SECONDS
    )


def shutting_down() -> ServerBusyError:
    """Why wants end when the server does."""
    return ServerBusyError("it is shutting down", RETRY_AFTER_SECONDS)


def too_long_in_line(seconds: float) -> ServerBusyError:
    """Why a request waits no longer although the workers get on."""
    what = f"others were encoded for {seconds:g} s before this reference audio"
    return ServerBusyError(what, RETRY_AFTER_SECONDS)


def timed_out(seconds: float) -> EncodeTimeoutError:
    """Why a want ends that nobody gets on with."""
    return EncodeTimeoutError(
        f"The reference audio was not encoded within {seconds:g} s; it may still be "
        "under way. Try again, or raise SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS."
    )
