"""What our routes share: keys, bounded bodies, and errors in the host's JSON shape."""

import logging
from collections.abc import Callable, Coroutine, MutableMapping
from contextlib import suppress
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
from vllm_tts_cache.entrypoints.http.limits import (
    check_batch,
    check_speech,
    refuse_halves,
)
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
from vllm_tts_cache.store import bundle_format

Message = MutableMapping[str, Any]

# Parsed, each takes some hundred bytes, and each that is wrong some thousand.
JSON_MAX_PARTS = 500_000
_MAX_DIGITS = 18
_END = {"type": "http.disconnect"}
_KINDS = {
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.CONFLICT: "ConflictError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
}

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

_MIB = 1024 * 1024
# A clip, and what a form holds beside it: texts, an embedding, the parts' headers.
VOICE_MAX_BYTES = DEFAULT_LIMITS.max_bytes + _MIB
# Texts in JSON, each with a limit of its own.
CHANGES_MAX_BYTES = 64 * 1024
_SPEECH, _BATCH = "/v1/audio/speech", "/v1/audio/speech/batch"
_GENERATE, _IMPORT = "/v1/audio/generate", "/v1/audio/voices/import"
_REGISTERING = ("/v1/audio/voices", _IMPORT)
_MAX_BYTES = {
    # A clip in base64, and 1 MiB of text and options.
    _SPEECH: -(-DEFAULT_LIMITS.max_bytes // 3) * 4 + _MIB,
    # It has 32 items by the host's default; few of them bring a clip of their own.
    _BATCH: 64 * _MIB,
    # The host takes texts and numbers there, and no audio.
    _GENERATE: _MIB,
    _IMPORT: bundle_format.MAX_BYTES + _MIB,
}
_CHECKS = {_SPEECH: check_speech, _BATCH: check_batch, _GENERATE: check_speech}


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


class BoundedRequest(Request):
    """A request whose body is bounded while it arrives, and whose JSON is checked.

    Of a body that is too large or is cut off FastAPI sees a client that has left, and
    closes the files of the form. What is wrong is the ``error``.

    Args:
        request: As it came.
        max_bytes: Of the body.
        check_json: Refuses JSON before FastAPI makes a model of it; None: takes all.
        is_form: Whether the route takes a form.
    """

    def __init__(
        self,
        request: Request,
        max_bytes: int,
        check_json: Callable[[object], None] | None,
        *,
        is_form: bool,
    ):
        super().__init__(request.scope, self._bounded)
        self._unbounded = request.receive
        self._max_bytes = max_bytes
        self._check_json = check_json
        self._num_bytes = self._num_parts = 0
        self._is_form = is_form
        self._has_form_ended = False
        self._parser: MultipartParser | None = None
        kind, options = parse_options_header(self.headers.get("content-type"))
        boundary = options.get(b"boundary")
        if is_form and kind == b"multipart/form-data" and boundary is not None:
            # Reads along, to see whether the end comes. The parser that keeps the parts
            # takes a form without it: a field may be missing then that was sent, and
            # the file of a part that was begun is never closed.
            with suppress(FormParserError):  # which the other one raises as well
                self._parser = MultipartParser(boundary, {"on_end": self._end_form})
        self.error: SpeakerRequestError | None = None
        announced = self.headers.get("content-length", "")
        if announced.isascii() and announced.isdigit():
            # Python refuses to read a number of more than 4,300 digits.
            self._bound(int(announced[:_MAX_DIGITS]))

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error

    async def json(self) -> Any:
        """Return the body. Raises: SpeakerRequestError, JSONDecodeError."""
        given = await super().json()
        refuse_halves(given)
        if self._check_json is not None:
            self._check_json(given)
        return given

    async def _bounded(self) -> Message:
        """Return the next message; of a body with an error, that the client left."""
        message = await self._unbounded()
        if message["type"] == "http.request":
            data = message.get("body", b"")
            self._num_bytes += len(data)
            self._bound(self._num_bytes)
            if not self._is_form:
                self._num_parts += sum(map(data.count, (b"{", b"[", b",")))
                if self._num_parts > JSON_MAX_PARTS:
                    self.error = self.error or TooManyPartsError()
            if self._parser is not None:
                try:
                    self._parser.write(data)
                except FormParserError:  # which the other one raises as well
                    self._end_form()
                if not (message.get("more_body") or self._has_form_ended):
                    self.error = self.error or FormCutOffError()
        return message if self.error is None else _END

    def _bound(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            self.error = RequestTooLargeError(self._max_bytes)

    def _end_form(self) -> None:
        self._has_form_ended = True


class GuardedRoute(APIRoute):
    """Finds who calls, bounds the body, counts uploads, and answers our errors.

    The host's application owns its exception handlers, and knows no tenants.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler that FastAPI made."""
        handle = super().get_route_handler()
        of_body = None if self.body_field is None else self.body_field.field_info
        is_form = isinstance(of_body, params.Form)
        fields = get_flat_dependant(self.dependant).body_params
        files = {f.alias for f in fields if isinstance(f.field_info, params.File)}
        is_json = of_body is not None and not is_form
        usual = CHANGES_MAX_BYTES if is_json else VOICE_MAX_BYTES
        max_bytes, check = _MAX_BYTES.get(self.path, usual), _CHECKS.get(self.path)

        async def bounded(request: Request) -> Response:
            seen = BoundedRequest(request, max_bytes, check, is_form=is_form)
            seen.check()
            try:
                answer = await handle(seen)
            except HTTPException as exc:
                # FastAPI takes what goes wrong while it reads for a body that is
                # wrong: a body without end, or a full disk to spool an upload to.
                raise seen.error or _error_behind(exc) from exc
            except RequestValidationError as exc:
                errors = exc.errors()
                invalid = invalid_request(errors, is_form=is_form, files=files)
                raise seen.error or invalid from exc
            seen.check()
            return answer

        async def counted(request: Request) -> Response:
            """Count a registration, also one that a form's parser refuses."""
            metrics = process_metrics()
            metrics.uploads.inc()
            try:
                return await bounded(request)
            except Exception as exc:
                metrics.refuse_upload(exc)
                raise

        is_upload = self.path in _REGISTERING and "POST" in self.methods
        answer_to = counted if is_upload else bounded

        async def guarded(request: Request) -> Response:
            try:
                request.state.caller = caller_of(request)
                return await answer_to(request)
            except TTSCacheError as exc:
                if exc.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    cause = f"answering: {type(exc).__name__}"
                    # Not the path that was called, which may name a voice.
                    where = request.method, self.path
                    throttled.warn_of(cause, "%s %s: %s", *where, exc.log_text)
                return json_response(exc)

        return guarded


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


def json_response(
    error: TTSCacheError, status: HTTPStatus | None = None, **details: Any
) -> JSONResponse:
    """Return the answer of a route; ``details`` go beside ``error``.

    ``status`` is the error's own, if it is not given.
    """
    status = status or error.http_status
    kind = _KINDS.get(status, "BadRequestError")
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        kind = "InternalServerError"
    param = getattr(error, "param", None)
    body = bounded_error_response(str(error), kind, status, param).model_dump()
    headers: dict[str, str] = getattr(error, "headers", {})
    if (seconds := getattr(error, "retry_after_seconds", None)) is not None:
        headers = {"Retry-After": str(seconds)}
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
    is_unknown = error.http_status is HTTPStatus.NOT_FOUND
    return json_response(error, HTTPStatus.BAD_REQUEST if is_unknown else None)
