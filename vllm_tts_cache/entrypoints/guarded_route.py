"""Routes with a bound on the body, whose errors are answered in the host's shape."""

import logging
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from tempfile import gettempdir
from typing import Any

from fastapi import HTTPException as FastAPIHTTPException
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException

from vllm_tts_cache.audio.limits import DEFAULT_LIMITS
from vllm_tts_cache.entrypoints import http_errors
from vllm_tts_cache.errors import (
    InvalidSpeakerError,
    RequestTooLargeError,
    TTSCacheError,
)
from vllm_tts_cache.files import storage_error
from vllm_tts_cache.throttled_log import ThrottledLog

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

_MIB = 1024 * 1024
_MAX_DIGITS = 18
# A clip, and what a form holds beside it: texts, an embedding, the parts' headers.
VOICE_MAX_BYTES = DEFAULT_LIMITS.max_bytes + _MIB
# A clip in base64, and 1 MiB of text and options.
SPEECH_MAX_BYTES = -(-DEFAULT_LIMITS.max_bytes // 3) * 4 + _MIB
# A batch has 32 items by the host's default; few of them bring a clip of their own.
BATCH_MAX_BYTES = 64 * _MIB


class GuardedRoute(APIRoute):
    """Maps our errors here: the host's application owns its exception handlers."""

    body_max_bytes = _MIB

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler that FastAPI made."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            body = _BoundedBody(request.receive, self.body_max_bytes)
            try:
                body.check_announced(request.headers.get("content-length"))
                return await handle(Request(request.scope, body.receive))
            except TTSCacheError as exc:
                return _answer(request, exc)
            except HTTPException as exc:
                # FastAPI takes what goes wrong while it reads for a body that is
                # wrong: a body without end, or a full disk to spool an upload to.
                if body.is_too_large:
                    return _answer(request, RequestTooLargeError(self.body_max_bytes))
                return _answer(request, _error_behind(exc))

        return guarded


def guarded_route(body_max_bytes: int) -> type[GuardedRoute]:
    """Return the route class whose bodies have at most so many bytes."""
    return type("GuardedRoute", (GuardedRoute,), {"body_max_bytes": body_max_bytes})


class _BoundedBody:
    """Counts a body while it arrives, and ends the reading of one that is too large."""

    def __init__(self, receive: Receive, max_bytes: int):
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @property
    def is_too_large(self) -> bool:
        return self._num_bytes > self._max_bytes

    def check_announced(self, content_length: str | None) -> None:
        """Refuse a body before any of it is read, if its sender says how large it is.

        Raises: RequestTooLargeError.
        """
        if content_length and content_length.isascii() and content_length.isdigit():
            # Python refuses to read a number of more than 4,300 digits.
            self._check(int(content_length[:_MAX_DIGITS]))

    async def receive(self) -> Message:
        """Pass the next message on.

        Raises: MultiPartException, on which a parser of forms removes its files.
        """
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self.is_too_large:
            raise MultiPartException("the body is too large")
        return message

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise RequestTooLargeError(self._max_bytes)


def _error_behind(exc: HTTPException) -> TTSCacheError:
    """Return the error of ours that an exception stands for.

    Raises: FastAPI's exception if there is none: Starlette's own class, which it is a
        subclass of, would pass the host's handler by.
    """
    cause = exc.__cause__
    if isinstance(cause, OSError):
        return storage_error(gettempdir(), cause)
    if isinstance(cause, UnicodeEncodeError):
        # The host answers with the text that it refuses, and cannot.
        return InvalidSpeakerError(
            "text", "a field contains an unpaired surrogate, which is not a character"
        )
    raise FastAPIHTTPException(exc.status_code, exc.detail, exc.headers) from exc


def _answer(request: Request, error: TTSCacheError) -> Response:
    if http_errors.is_server_fault(http_errors.status_of(error)):
        cause = f"answering: {type(error).__name__}"
        throttled.warn_of(cause, "%s %s: %s", request.method, request.url.path, error)
    return http_errors.json_response(error)
