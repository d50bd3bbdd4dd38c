"""Large answers, sent in pieces, each of which the client has to take in time."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from vllm_tts_cache.errors import SpeakerRequestError

# How long a client that does not read is waited for.
SEND_SECONDS = 60.0
# So much is handed to a client that reads slowly before it has taken the last.
_PIECE_BYTES = 256 * 1024
# One range of bytes; what asks for several, or in another way, is sent the whole file.
_RANGE = re.compile(r"bytes=(\d{1,18})?-(\d{1,18})?", re.ASCII | re.IGNORECASE)


class RangeNotSatisfiableError(SpeakerRequestError):
    """A request asks for bytes behind the end of a file (416).

    Attributes:
        num_bytes: What the file has.
    """

    http_status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE

    def __init__(self, asked: str, num_bytes: int):
        super().__init__(
            f"Invalid Range: {asked[:64]!r} asks for bytes behind the end, and the "
            f"file has {num_bytes}. Leave it out, or ask for bytes=0-{num_bytes - 1}."
        )
        self.num_bytes = num_bytes


class PlacedFile(StreamingResponse):
    """A file in memory; gives its place back however it ends, begun or not.

    Args:
        data: What is sent; the answer says how long it is.
        leave: Gives the place back.
        media_type: What it is.
        headers: Sent with it.
    """

    def __init__(
        self,
        data: bytes,
        leave: Callable[[], None],
        media_type: str,
        headers: Mapping[str, str],
    ):
        headers = {**headers, "Content-Length": str(len(data))}
        super().__init__(_in_pieces(data), media_type=media_type, headers=headers)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""

        async def in_time(message: Message) -> None:
            try:
                await asyncio.wait_for(send(message), SEND_SECONDS)
            except asyncio.TimeoutError:
                # As if it had left: others wait for its place.
                raise OSError("the client does not read") from None

        pieces: Any = self.body_iterator
        try:
            async with aclosing(pieces):
                await super().__call__(scope, receive, in_time)
        finally:
            self._leave()


class Wanted:
    """What a request wants of a file: all of it, a range of bytes, or its headers."""

    def __init__(
        self,
        request: Request,
        asked_range: Annotated[
            str | None,
            Header(
                alias="Range",
                description="one range of bytes",
                examples=["bytes=0-1023"],
            ),
        ] = None,
        if_range: Annotated[
            str | None,
            Header(
                alias="If-Range",
                description="the `ETag` of the file that the range is of",
                examples=['"5f0c2b9a64d1473e8a1b2c3d4e5f6071"'],
            ),
        ] = None,
    ):
        self._is_head = request.method == "HEAD"
        self._range = asked_range
        self._if_range = if_range

    def answer(
        self,
        data: bytes,
        leave: Callable[[], None],
        media_type: str,
        headers: Mapping[str, str],
        etag: str,
    ) -> Response:
        """Return the answer of a file in memory, whose bytes ``etag`` names.

        Raises: RangeNotSatisfiableError; the place is given back.
        """
        headers = {**headers, "Accept-Ranges": "bytes", "ETag": f'"{etag}"'}
        if self._is_head:
            leave()
            headers["Content-Length"] = str(len(data))
            return Response(media_type=media_type, headers=headers)
        try:
            part = self._part(len(data), headers["ETag"])
        except RangeNotSatisfiableError:
            leave()
            raise
        if part is None:
            return PlacedFile(data, leave, media_type, headers)
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{len(data)}"
        answer = PlacedFile(data[part.start : part.stop], leave, media_type, headers)
        answer.status_code = 206
        return answer

    def _part(self, num_bytes: int, etag: str) -> range | None:
        """Return which bytes are wanted; None for all.

        Raises: RangeNotSatisfiableError.
        """
        asked = _RANGE.fullmatch((self._range or "").strip())
        if asked is None or self._if_range not in (None, etag):
            return None
        first, last = (None if each is None else int(each) for each in asked.groups())
        if first is None:
            if last is None:
                return None
            part = range(max(0, num_bytes - last), num_bytes)
        elif last is not None and last < first:
            return None
        else:
            end = num_bytes if last is None else min(last + 1, num_bytes)
            part = range(first, end)
        if not part:
            raise RangeNotSatisfiableError(asked.group(), num_bytes)
        return part


Wants = Annotated[Wanted, Depends()]


async def _in_pieces(data: bytes) -> AsyncIterator[bytes]:
    """Cut what is in memory.

    Handed over whole, all of it is taken at once, and kept in a buffer of the socket's
    for as long as the client likes.
    """
    for at in range(0, len(data), _PIECE_BYTES):
        yield data[at : at + _PIECE_BYTES]
