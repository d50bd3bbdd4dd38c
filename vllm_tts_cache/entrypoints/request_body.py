"""The body of a request while it arrives: not too large, and whole if it is a form."""

from collections.abc import MutableMapping
from typing import Any

from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.formparsers import MultiPartException

from vllm_tts_cache.errors import RequestTooLargeError

Message = MutableMapping[str, Any]

_MAX_DIGITS = 18


class BoundedBody:
    """Counts a body while it arrives, and ends the reading of what is no good.

    Args:
        request: Whose body it is. One that says how large it is is refused unread.
        max_bytes: What the route takes.

    Raises: RequestTooLargeError.
    """

    def __init__(self, request: Request, max_bytes: int):
        self._receive = request.receive
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._form = _form_of(request.headers.get("content-type"))
        length = request.headers.get("content-length")
        if length and length.isascii() and length.isdigit():
            # Python refuses to read a number of more than 4,300 digits.
            self._check(int(length[:_MAX_DIGITS]))

    @property
    def is_too_large(self) -> bool:
        """Whether more came than the route takes."""
        return self._num_bytes > self._max_bytes

    async def receive(self) -> Message:
        """Pass the next message on.

        Raises: MultiPartException, on which a parser of forms removes its files.
        """
        message = await self._receive()
        data = message.get("body", b"")
        self._num_bytes += len(data)
        if self.is_too_large:
            raise MultiPartException("the body is too large")
        if self._form is not None and message["type"] == "http.request":
            self._form.feed(data, is_last=not message.get("more_body", False))
        return message

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise RequestTooLargeError(self._max_bytes)


class _MultipartEnd:
    """Looks for the line that ends a form of several parts (RFC 2046, 5.1.1).

    The parser takes one without it: a field may be missing then that was sent, and the
    file of a part that was begun is closed by nobody.
    """

    def __init__(self, boundary: bytes):
        self._line = b"\r\n--%b--" % boundary
        self._tail = b"\r\n"  # the line may be the first one
        self._has_ended = False

    def feed(self, data: bytes, *, is_last: bool) -> None:
        """Take the next bytes.

        Raises: MultiPartException if they were the last ones, and the end is missing.
        """
        if not self._has_ended:
            searched = self._tail + data
            self._has_ended = self._line in searched
            self._tail = searched[1 - len(self._line) :]
        if is_last and not self._has_ended:
            raise MultiPartException(
                "The form ends before its last part does, so something of it is "
                "missing: send it whole, up to the closing boundary."
            )


def _form_of(content_type: str | None) -> _MultipartEnd | None:
    """Return what reads a form along, or None where there are no parts."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or boundary is None:
        return None
    return _MultipartEnd(boundary)
