"""Large answers, sent in pieces, each of which the client has to take in time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

# How long a client that does not read is waited for.
SEND_SECONDS = 60.0
# So much is handed to a client that reads slowly before it has taken the last.
_PIECE_BYTES = 256 * 1024


class PlacedAnswer(StreamingResponse):
    """One that gives its place back however it ends, begun or not.

    Args:
        pieces: What is sent.
        leave: Gives the place back.
        media_type: What it is.
        headers: Sent with it.
    """

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        leave: Callable[[], None],
        media_type: str,
        headers: Mapping[str, str],
    ):
        super().__init__(pieces, media_type=media_type, headers=headers)
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


def placed_file(
    data: bytes,
    leave: Callable[[], None],
    media_type: str,
    headers: Mapping[str, str],
) -> PlacedAnswer:
    """Return an answer of what is in memory; it says how long it is."""
    headers = {**headers, "Content-Length": str(len(data))}
    return PlacedAnswer(in_pieces(data), leave, media_type, headers)


async def in_pieces(data: bytes) -> AsyncIterator[bytes]:
    """Cut what is in memory.

    Handed over whole, all of it is taken at once, and kept in a buffer of the socket's
    for as long as the client likes.
    """
    for at in range(0, len(data), _PIECE_BYTES):
        yield data[at : at + _PIECE_BYTES]
