"""What our routes share: keys, bounded bodies, and errors in the host's JSON shape."""

import logging
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from http import HTTPStatus
from tempfile import gettempdir
from typing import Any

from fastapi import HTTPException as FastAPIHTTPException
from fastapi import Request, Response, params
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException

from vllm_tts_cache.audio.limits import DEFAULT_LIMITS
from vllm_tts_cache.entrypoints.http.callers import caller_of
from vllm_tts_cache.entrypoints.http.limits import refuse_halves
from vllm_tts_cache.entrypoints.metrics.series import process_metrics
from vllm_tts_cache.entrypoints.serving.host_http import (
    bounded_error_response,
    invalid_request,
)
from vllm_tts_cache.errors import (
    DeletionPendingError,
    InvalidSpeakerError,
    RequestTooLargeError,
    SpeakerRequestError,
    TTSCacheError,
)
from vllm_tts_cache.files import storage_error
from vllm_tts_cache.logs import ThrottledLog

Message = MutableMapping[str, Any]

# Parsed, each takes some hundred bytes, and each that is wrong some thousand.
JSON_MAX_PARTS = 500_000
_MAX_DIGITS = 18
_END = {"type": "http.disconnect"}

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

_MIB = 1024 * 1024
# A clip, and what a form holds beside it: texts, an embedding, the parts' headers.
VOICE_MAX_BYTES = DEFAULT_LIMITS.max_bytes + _MIB
# Texts in JSON, each with a limit of its own.
CHANGES_MAX_BYTES = 64 * 1024
# A clip in base64, and 1 MiB of text and options.
SPEECH_MAX_BYTES = -(-DEFAULT_LIMITS.max_bytes // 3) * 4 + _MIB
# A batch has 32 items by the host's default; few of them bring a clip of their own.
BATCH_MAX_BYTES = 64 * _MIB
_REGISTERING = ("/v1/audio/voices", "/v1/audio/voices/import")


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
    """Counts a body while it arrives, and ends one that is too large or is cut off.

    FastAPI sees a client that has left then, and closes the files of the form. What is
    wrong is the ``error``.
    """

    def __init__(self, request: Request, max_bytes: int, *, is_form: bool):
        self._receive = request.receive
        self._max_bytes = max_bytes
        self._num_bytes = self._num_parts = 0
        self._is_form = is_form
        headers = request.headers
        self._form = _Form.of(headers.get("content-type")) if is_form else None
        self.error: SpeakerRequestError | None = None
        announced = headers.get("content-length", "")
        if announced.isascii() and announced.isdigit():
            # Python refuses to read a number of more than 4,300 digits.
            self._bound(int(announced[:_MAX_DIGITS]))

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error

    async def receive(self) -> Message:
        """Return the next message; of a body with an error, that the client left."""
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
    that was sent, and the file of a part that was begun is never closed.
    """

    def __init__(self, boundary: bytes):
        self.has_ended = False
        self._boundary = boundary
        self._parser: MultipartParser | None = None

    @classmethod
    def of(cls, content_type: str | None) -> "_Form | None":
        """Return what reads a form along, or None where there are no parts."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or boundary is None:
            return None
        return cls(boundary)

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


class GuardedRoute(APIRoute):
    """Finds who calls, bounds the body, and answers our errors.

    The host's application owns its exception handlers, and knows no tenants.
    """

    body_max_bytes = _MIB
    check_json: Callable[[object], None] | None = None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler that FastAPI made."""
        handle = super().get_route_handler()
        of_body = None if self.body_field is None else self.body_field.field_info
        is_form = isinstance(of_body, params.Form)
        fields = get_flat_dependant(self.dependant).body_params
        files = {f.alias for f in fields if isinstance(f.field_info, params.File)}

        async def bounded(request: Request) -> Response:
            body = BoundedBody(request, self.body_max_bytes, is_form=is_form)
            body.check()
            try:
                answer = await handle(_Request(request, body, type(self).check_json))
            except HTTPException as exc:
                # FastAPI takes what goes wrong while it reads for a body that is
                # wrong: a body without end, or a full disk to spool an upload to.
                raise body.error or _error_behind(exc) from exc
            except RequestValidationError as exc:
                errors = exc.errors()
                invalid = invalid_request(errors, is_form=is_form, files=files)
                raise body.error or invalid from exc
            body.check()
            return answer

        async def guarded(request: Request) -> Response:
            try:
                request.state.caller = caller_of(request)
                return await self._handled(bounded(request))
            except TTSCacheError as exc:
                return self._answer(request, exc)

        return guarded

    async def _handled(self, handling: Awaitable[Response]) -> Response:
        return await handling

    def _answer(self, request: Request, error: TTSCacheError) -> Response:
        if error.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            cause = f"answering: {type(error).__name__}"
            # Not the path that was called, which may name a voice.
            where = request.method, self.path
            throttled.warn_of(cause, "%s %s: %s", *where, error.log_text)
        return json_response(error)


class VoicesRoute(GuardedRoute):
    """Counts registrations, also those that a form's parser refuses."""

    async def _handled(self, handling: Awaitable[Response]) -> Response:
        if self.path not in _REGISTERING or "POST" not in self.methods:
            return await handling
        metrics = process_metrics()
        metrics.uploads.inc()
        try:
            return await handling
        except Exception as exc:
            metrics.refuse_upload(exc)
            raise


class _Request(Request):
    """One whose JSON is checked before FastAPI makes a model of it."""

    def __init__(
        self,
        request: Request,
        body: BoundedBody,
        check: Callable[[object], None] | None,
    ):
        super().__init__(request.scope, body.receive)
        self._check = check

    async def json(self) -> Any:
        """Return the body. Raises: SpeakerRequestError, JSONDecodeError."""
        given = await super().json()
        refuse_halves(given)
        if self._check is not None:
            self._check(given)
        return given


def guarded_route(
    body_max_bytes: int,
    kind: type[GuardedRoute] = GuardedRoute,
    check_json: Callable[[object], None] | None = None,
) -> type[GuardedRoute]:
    """Return a subclass of ``kind`` whose bodies have at most ``body_max_bytes``.

    ``check_json`` raises a `SpeakerRequestError` for JSON that it refuses.
    """
    limits = {
        "body_max_bytes": body_max_bytes,
        "check_json": None if check_json is None else staticmethod(check_json),
    }
    return type(kind.__name__, (kind,), limits)


def _error_behind(exc: HTTPException) -> TTSCacheError:
    """Return the error of ours that an exception stands for.

    Raises: FastAPI's exception if there is none: Starlette's own class, which it is a
        subclass of, would pass the host's handler by.
    """
    cause = exc.__cause__
    if isinstance(cause, TTSCacheError):
        return cause
    if isinstance(cause, OSError):
        return storage_error(gettempdir(), cause)
    if exc.detail.startswith("Part exceeded maximum size"):
        return InvalidSpeakerError("form", _TOO_MUCH_TEXT)
    raise FastAPIHTTPException(exc.status_code, exc.detail, exc.headers) from exc


_TOO_MUCH_TEXT = (
    "a field has more than 1 MiB of text. Send a clip as a file: its part of the form "
    "needs a filename (curl: -F audio_sample=@clip.wav)"
)


class NoSpeechModelError(SpeakerRequestError):
    """The served model has no speech API."""

    http_status = HTTPStatus.NOT_FOUND

    def __init__(self) -> None:
        super().__init__("The model does not support Speech API")


def json_response(error: TTSCacheError, **details: Any) -> JSONResponse:
    """Return the answer of a voices route; ``details`` go beside ``error``."""
    status = error.http_status
    param = getattr(error, "param", None)
    body = bounded_error_response(str(error), _kind(status), status, param).model_dump()
    headers = getattr(error, "headers", None) or _retry_after(error)
    if status is HTTPStatus.UNAUTHORIZED:
        headers = {"WWW-Authenticate": "Bearer"}
    return JSONResponse({**body, **details}, status_code=status.value, headers=headers)


def pending_response(error: DeletionPendingError) -> JSONResponse:
    """Return the answer of a DELETE that goes on: how far it is."""
    progress = {"files_removed": error.files_removed, "waiting_for": error.waiting_for}
    return json_response(error, deletion=progress)


def speech_response(error: TTSCacheError) -> JSONResponse:
    """Return the answer of a speech route.

    An unknown voice is a wrong field there, not a missing resource.
    """
    status = error.http_status
    if status is HTTPStatus.NOT_FOUND:
        status = HTTPStatus.BAD_REQUEST
    body = bounded_error_response(str(error), _kind(status), status).model_dump()
    return JSONResponse(body, status_code=status.value, headers=_retry_after(error))


def _retry_after(error: TTSCacheError) -> dict[str, str] | None:
    seconds = getattr(error, "retry_after_seconds", None)
    return None if seconds is None else {"Retry-After": str(seconds)}


def _kind(status: HTTPStatus) -> str:
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "InternalServerError"
    kinds = {
        HTTPStatus.NOT_FOUND: "NotFoundError",
        HTTPStatus.CONFLICT: "ConflictError",
        HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    }
    return kinds.get(status, "BadRequestError")
