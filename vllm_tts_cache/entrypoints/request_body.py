"""The body of a request while it arrives: not too large, and whole if it is a form."""

from collections.abc import MutableMapping
from typing import Any

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vllm_tts_cache.errors import RequestTooLargeError, SpeakerRequestError

Message = MutableMapping[str, Any]

# Parsed, each takes some hundred bytes, and each that is wrong some thousand.
JSON_MAX_PARTS = 500_000
_MAX_DIGITS = 18
_END = {"type": "http.disconnect"}


class FormCutOffError(SpeakerRequestError):
    """A form of several parts came without its end (400)."""

    def __init__(self) -> None:
        super().__init__(
            "The form ends before its last part does, so something of it is missing: "
            "send it whole, up to the closing boundary."
        )


class TooManyPartsError(SpeakerRequestError):
    """JSON of more values than any request has (400)."""

    def __init__(self) -> None:
        super().__init__(
            f"The request has more than {JSON_MAX_PARTS:,} values; send less at a time."
        )


class BoundedBody:
    """Counts a body while it arrives, and ends the reading of what is no good.

    Whoever reads it is told that the client has left then, and lets go of its files.

    Args:
        request: Whose body it is.
        max_bytes: What the route takes.
        is_form: Whether the route takes a form.

    Attributes:
        error: What is wrong with the body, as far as it is known.
    """

    def __init__(self, request: Request, max_bytes: int, *, is_form: bool):
        self._receive = request.receive
        self._max_bytes = max_bytes
        self._num_bytes = self._num_parts = 0
        self._is_form = is_form
        headers = request.headers
        self._form = _form_of(headers.get("content-type")) if is_form else None
        self.error: SpeakerRequestError | None = None
        self._bound(_announced(headers.get("content-length")))

    def check(self) -> None:
        """Raise what is wrong with it."""
        if self.error is not None:
            raise self.error

    async def receive(self) -> Message:
        """Pass the next message on, or say that there is none if that is wrong."""
        message = await self._receive()
        if message["type"] == "http.request":
            data = message.get("body", b"")
            self._num_bytes += len(data)
            self._bound(self._num_bytes)
            if not self._is_form:
                self._num_parts += sum(map(data.count, (b"{", b"[", b",")))
                if self._num_parts > JSON_MAX_PARTS:
                    self.error = self.error or TooManyPartsError()
            if self._form is not None:
                self._form.write(data)
                if not (message.get("more_body") or self._form.has_ended):
                    self.error = self.error or FormCutOffError()
        return message if self.error is None else _END

    def _bound(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            self.error = RequestTooLargeError(self._max_bytes)


class _Form:
    """Reads a form of several parts along, to see whether its end comes.

    The parser that keeps the parts takes one without it: a field may be missing then
    that was sent, and the file of a part that was begun is closed by nobody.
    """

    def __init__(self, boundary: bytes):
        self.has_ended = False
        self._boundary = boundary
        self._parser: MultipartParser | None = None

    def write(self, data: bytes) -> None:
        """Take the next bytes."""
        try:
            if self._parser is None:
                self._parser = MultipartParser(self._boundary, {"on_end": self._end})
            self._parser.write(data)
        except FormParserError:  # which the other one raises as well
            self._end()

    def _end(self) -> None:
        self.has_ended = True


def _form_of(content_type: str | None) -> _Form | None:
    """Return what reads a form along, or None where there are no parts."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or boundary is None:
        return None
    return _Form(boundary)


def _announced(content_length: str | None) -> int:
    """How many bytes the sender says that there are, if it does."""
    if content_length and content_length.isascii() and content_length.isdigit():
        # Python refuses to read a number of more than 4,300 digits.
        return int(content_length[:_MAX_DIGITS])
    return 0
