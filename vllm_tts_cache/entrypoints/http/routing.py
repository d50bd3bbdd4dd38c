"""What our routes share: callers, bounded bodies, and errors in the host's JSON shape.

A client that reaches a server without a key may use it, and so might any page that its
browser shows: browsers send a form without asking the server first, and by the default
of 0.30 (`--allowed-origins '["*"]'`) pages may read the answers as well. So a page of
another site is refused.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from http import HTTPStatus
from tempfile import gettempdir
from typing import Annotated, Any

from fastapi import Depends, Request, Response, params
from fastapi import HTTPException as FastAPIHTTPException
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import Message

from vllm_tts_cache import errors
from vllm_tts_cache.audio.decode import CLIP_MAX_BYTES
from vllm_tts_cache.entrypoints.http import limits
from vllm_tts_cache.entrypoints.metrics import process_metrics, reason_of
from vllm_tts_cache.entrypoints.serving.host_http import (
    bounded_error_response,
    invalid_request,
    wants_key,
)
from vllm_tts_cache.files import storage_error
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.store import bundle_format
from vllm_tts_cache.tenants import ALONE, Caller, Tenant, TenantKeys

# A parsed value takes some hundred bytes, an invalid one some thousand.
JSON_MAX_PARTS = 500_000
_MAX_DIGITS = 18
_END = {"type": "http.disconnect"}
_ERROR_TYPES = {
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.CONFLICT: "ConflictError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
}

_READING = frozenset({"GET", "HEAD", "OPTIONS"})

throttled = ThrottledLog()

_MIB = 1024 * 1024
# A clip, and what a form holds beside it: texts, an embedding, the parts' headers.
VOICE_MAX_BYTES = CLIP_MAX_BYTES + _MIB
# The body of a PATCH: texts in JSON, each with a limit of its own.
CHANGES_MAX_BYTES = 64 * 1024
_SPEECH, _BATCH = "/v1/audio/speech", "/v1/audio/speech/batch"
_GENERATE, _IMPORT = "/v1/audio/generate", "/v1/audio/voices/import"
_REGISTERING = ("/v1/audio/voices", _IMPORT)
_MAX_BYTES = {
    # A clip in base64, and 1 MiB of text and options.
    _SPEECH: -(-CLIP_MAX_BYTES // 3) * 4 + _MIB,
    # By the host's default 32 items; few of them bring a clip of their own.
    _BATCH: 64 * _MIB,
    # The host takes texts and numbers there, and no audio.
    _GENERATE: _MIB,
    _IMPORT: bundle_format.MAX_BYTES + _MIB,
    "/v1/vapi/{name}": _MIB,
}
_CHECKS: dict[str, Any] = dict.fromkeys((_SPEECH, _GENERATE), limits.check_speech)
_CHECKS[_BATCH] = limits.check_batch
# Bytes of all bodies that have begun to arrive: else half-sent ones fill the memory and
# TMPDIR. A web server buffers a small body anyway, so small ones are not counted.
ARRIVING_MAX_BYTES = 512 * _MIB
_SMALL_BYTES = 64 * 1024
# How long a client may pause in a large body, and how far it may fall behind the rate
# in all: by the first limit alone it could be slow for hours.
PATIENCE_SECONDS = 60.0
MIN_BYTES_PER_SECOND = 64 * 1024


def caller_of(connection: HTTPConnection) -> Caller:
    """Return the caller who sends a request or opens a WebSocket.

    Raises: UnauthorizedError, OtherSiteError.
    """
    handler = getattr(connection.app.state, "openai_serving_speech", None)
    keys = getattr(getattr(handler, "speakers", None), "tenants", None)
    if isinstance(keys, TenantKeys) and keys.is_on:
        return keys.caller(connection.headers.get("authorization"))
    refuse_other_sites(connection)
    return Caller(tenant=ALONE)


def tenant_of(caller: Caller) -> Tenant:
    """Return the tenant whose voices a caller may see. Raises: AdminKeyError."""
    if caller.tenant is None:
        raise errors.AdminKeyError
    return caller.tenant


async def _caller(request: Request) -> Caller:
    return request.state.caller


async def calling_tenant(request: Request) -> Tenant:
    """Return the tenant whose voices the caller may see. Raises: AdminKeyError."""
    return tenant_of(request.state.caller)


AnyCaller = Annotated[Caller, Depends(_caller)]
CallingTenant = Annotated[Tenant, Depends(calling_tenant)]


class OtherSiteError(errors.SpeakerRequestError, status=403):
    """A page of another site sends a changing request and is not allowed to (403)."""

    text = (
        "A page of another site sent this request, and this server wants no key. "
        "Start it with the page's origin among --allowed-origins, or with a key "
        "(--api-key), which such a page does not know."
    )


def refuse_other_sites(connection: HTTPConnection) -> None:
    """Refuse a changing request of another site's page, unless the host wants a key.

    Reading is left to the host's setting, which browsers enforce.

    Raises: OtherSiteError.
    """
    # Browsers set both headers, and no page can change them; others send neither.
    site = connection.headers.get("sec-fetch-site")
    origin = connection.headers.get("origin")
    is_other = site == "cross-site"
    if site in (None, "same-site") and origin is not None:
        # Browsers do not send the header over plain HTTP, and some do not when they
        # open a WebSocket; all of them send the origin. Another host of the same site
        # (wiki.example.com) may be anybody's.
        is_other = origin.partition("://")[2] != connection.headers.get("host")
    if not is_other or connection.scope.get("method") in _READING:
        return
    if wants_key(connection.app):  # the host has checked the key before
        return
    args = getattr(connection.app.state, "args", None)
    # `*` lets all pages read; it does not let them register, speak and delete.
    allowed = {*(getattr(args, "allowed_origins", None) or ())} - {"*"}
    if origin not in allowed:
        raise OtherSiteError


def seconds_left(began: float, num_bytes: int) -> float:
    """Return how long a client may take for the next part of a body."""
    until = began + num_bytes / MIN_BYTES_PER_SECOND
    return PATIENCE_SECONDS + min(0, until - time.monotonic())


class FormCutOffError(errors.SpeakerRequestError):
    """A multipart form came without its end (400)."""

    text = (
        "The form ends before its last part does: send the whole form, up to the "
        "closing boundary."
    )


class TooManyPartsError(errors.SpeakerRequestError):
    """The JSON has more values than any request needs (400)."""

    text = f"The request has more than {JSON_MAX_PARTS:,} values; send less at a time."


class TooSlowError(errors.SpeakerRequestError, status=408):
    """A large body arrives too slowly, or no longer arrives (408)."""

    text = "The body came slower than 64 KiB a second; send it again, or less of it."


class BoundedRequest(Request):
    """A request whose body is bounded while it arrives, and whose JSON is checked.

    If the body is too large or cut off, FastAPI sees a client that has left, and closes
    the files of the form; ``error`` has the reason.

    Args:
        check_json: Refuses JSON before FastAPI makes a model of it; None: all is taken.
    """

    num_arriving = 0  # bytes of all large bodies that arrive in this process

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
        self._num_bytes = self._num_parts = self._num_held = 0
        self._began = time.monotonic()
        self._is_form = is_form
        self._has_form_ended = False
        self._parser: MultipartParser | None = None
        media_type, options = parse_options_header(self.headers.get("content-type"))
        boundary = options.get(b"boundary")
        if is_form and media_type == b"multipart/form-data" and boundary is not None:
            # Parses along, only to see whether the form ends. FastAPI's parser accepts
            # a form without its end: a field that was sent may be missing then, and the
            # file of an unfinished part is never closed.
            with suppress(FormParserError):  # FastAPI's parser raises the error
                self._parser = MultipartParser(boundary, {"on_end": self._end_form})
        self.error: errors.TTSCacheError | None = None
        announced = self.headers.get("content-length", "")
        if announced.isascii() and announced.isdigit():
            # Python refuses to read a number of more than 4,300 digits.
            self._bound(int(announced[:_MAX_DIGITS]))

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error

    async def json(self) -> Any:
        """Return the checked body. Raises: SpeakerRequestError, JSONDecodeError."""
        given = await super().json()
        limits.refuse_halves(given)
        if self._check_json is not None:
            self._check_json(given)
        return given

    async def _bounded(self) -> Message:
        """Return the next message; after an error, the one of a client that left."""
        if not self._num_held:
            message = await self._unbounded()
        else:
            left = seconds_left(self._began, self._num_bytes)
            try:
                message = await asyncio.wait_for(self._unbounded(), left)
            except TimeoutError:
                self.error = TooSlowError()
                return _END
        if message["type"] == "http.request":
            data = message.get("body", b"")
            self._num_bytes += len(data)
            self._bound(self._num_bytes)
            is_held = self._num_bytes > _SMALL_BYTES and message.get("more_body")
            self.hold(self._num_bytes if is_held else 0)
            if not self._is_form:
                self._num_parts += sum(map(data.count, (b"{", b"[", b",")))
                # Escapes are parsed while the event loop waits, too. The longest texts
                # of 32 items have two million, with a pair for each character.
                self._num_parts += data.count(b"\\") / 5
                if self._num_parts > JSON_MAX_PARTS:
                    self.error = self.error or TooManyPartsError()
            if self._parser is not None:
                try:
                    self._parser.write(data)
                except FormParserError:  # FastAPI's parser raises the error
                    self._end_form()
                if not (message.get("more_body") or self._has_form_ended):
                    self.error = self.error or FormCutOffError()
        return message if self.error is None else _END

    def hold(self, num_bytes: int) -> None:
        """Set how many bytes of this body count as arriving; too many are an error."""
        BoundedRequest.num_arriving += num_bytes - self._num_held
        self._num_held = num_bytes
        if num_bytes and BoundedRequest.num_arriving > ARRIVING_MAX_BYTES:
            what = "too many large bodies arrive at once"
            self.error = self.error or errors.ServerBusyError(what)

    def _bound(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            self.error = errors.RequestTooLargeError(self._max_bytes)

    def _end_form(self) -> None:
        self._has_form_ended = True


class GuardedRoute(APIRoute):
    """Finds the caller, bounds the body, counts uploads, and answers our errors.

    The host's application has handlers for its own exceptions, and knows no tenants.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, wrapped."""
        handle = super().get_route_handler()
        is_form = isinstance(getattr(self.body_field, "field_info", None), params.Form)
        self.fields = get_flat_dependant(self.dependant).body_params
        files = {f.alias for f in self.fields if isinstance(f.field_info, params.File)}
        usual = (
            CHANGES_MAX_BYTES if self.body_field and not is_form else VOICE_MAX_BYTES
        )
        max_bytes, check = _MAX_BYTES.get(self.path, usual), _CHECKS.get(self.path)

        async def bounded(request: Request) -> Response:
            seen = BoundedRequest(request, max_bytes, check, is_form=is_form)
            seen.check()
            try:
                answer = await handle(seen)
            except HTTPException as exc:
                # FastAPI reports every failure of a read as an invalid body, even a
                # body that is cut off, or a full disk to which it spools an upload.
                raise seen.error or _error_behind(exc) from exc
            except RequestValidationError as exc:
                invalid = invalid_request(exc.errors(), is_form=is_form, files=files)
                raise seen.error or invalid from exc
            finally:
                seen.hold(0)
            seen.check()
            return answer

        async def counted(request: Request) -> Response:
            """Count a registration, also one that a form's parser refuses."""
            metrics = process_metrics()
            metrics.uploads.inc()
            try:
                return await bounded(request)
            except Exception as exc:
                metrics.uploads_refused.labels(*reason_of(exc)).inc()
                raise

        is_upload = self.path in _REGISTERING and "POST" in self.methods
        answer_to = counted if is_upload else bounded

        async def guarded(request: Request) -> Response:
            try:
                request.state.caller = caller_of(request)
                return await answer_to(request)
            except errors.TTSCacheError as exc:
                if (
                    exc.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR
                    # It goes on by itself, so it is no fault to tell an operator of.
                    and not isinstance(exc, errors.DeletionPendingError)
                ):
                    cause = f"answering: {type(exc).__name__}"
                    # `self.path` is the route's: the request's path may name a voice.
                    values = request.method, self.path, exc.log_text
                    throttled.warn_of(cause, "%s %s: %s", *values)
                return json_response(exc)

        return guarded


def _error_behind(exc: HTTPException) -> Exception:
    """Return the error of ours that FastAPI reported as an invalid body.

    Without one, FastAPI's HTTPException: the host has no handler for its base class.
    """
    cause = exc.__cause__
    if isinstance(cause, errors.TTSCacheError):
        return cause
    if isinstance(cause, OSError):
        return storage_error(gettempdir(), cause)
    if exc.detail.startswith("Part exceeded maximum size"):
        reason = (
            "a field has more than 1 MiB of text. Send a clip as a file: its part of "
            "the form needs a filename (curl: -F audio_sample=@clip.wav)"
        )
        return errors.InvalidSpeakerError("form", reason)
    return FastAPIHTTPException(exc.status_code, exc.detail, exc.headers)


class NoSpeechModelError(errors.SpeakerRequestError, status=404):
    """The served model has no speech API."""

    text = "The model does not support Speech API"


def json_response(
    error: errors.TTSCacheError, status: HTTPStatus | None = None, **details: Any
) -> JSONResponse:
    """Return the answer of a route to an error.

    ``details``, and those of the error, stand beside ``error``. ``status`` replaces the
    error's own.
    """
    status = status or error.http_status
    error_type = _ERROR_TYPES.get(status, "BadRequestError")
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        error_type = "InternalServerError"
    param = getattr(error, "param", None)
    body = bounded_error_response(str(error), error_type, status, param).model_dump()
    headers: dict[str, str] = getattr(error, "headers", {})
    if (seconds := getattr(error, "retry_after_seconds", None)) is not None:
        headers = {"Retry-After": str(seconds)}
    if status is HTTPStatus.UNAUTHORIZED:
        headers = {"WWW-Authenticate": "Bearer"}
    answer = {**body, **getattr(error, "details", {}), **details}
    return JSONResponse(answer, status_code=status.value, headers=headers)


def speech_response(error: errors.TTSCacheError) -> JSONResponse:
    """Return the answer of a speech route.

    An unknown voice is a wrong field of a speech request, not a missing resource.
    """
    is_unknown = error.http_status is HTTPStatus.NOT_FOUND
    return json_response(error, HTTPStatus.BAD_REQUEST if is_unknown else None)
