"""What our routes share: keys, bodies, and errors in the host's JSON shape."""

import logging
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from tempfile import gettempdir
from typing import Any

from fastapi import HTTPException as FastAPIHTTPException
from fastapi import Request, Response, params
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)

from vllm_tts_cache.audio.limits import DEFAULT_LIMITS
from vllm_tts_cache.entrypoints.callers import caller_of
from vllm_tts_cache.entrypoints.other_sites import OtherSiteError
from vllm_tts_cache.entrypoints.request_body import BoundedBody
from vllm_tts_cache.entrypoints.wants import SpeakerReplacedError
from vllm_tts_cache.errors import (
    AdminKeyError,
    AudioBudgetError,
    ConsentInUseError,
    ConsentLimitError,
    ConsentNotFoundError,
    DeletionPendingError,
    DownloadsOffError,
    EncodeTimeoutError,
    InvalidSpeakerError,
    ObjectStoreError,
    PinLimitError,
    PreviewNotFoundError,
    RequestTooLargeError,
    ServerBusyError,
    ServerFaultError,
    SpeakerExistsError,
    SpeakerLimitError,
    SpeakerNotFoundError,
    SpeakerRequestError,
    StorageBusyError,
    StorageFullError,
    StorageUnavailableError,
    TTSCacheError,
    UnauthorizedError,
)
from vllm_tts_cache.files import storage_error
from vllm_tts_cache.speaker.rpc_client import WorkerBusyError
from vllm_tts_cache.throttled_log import ThrottledLog

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

_MIB = 1024 * 1024
# A clip, and what a form holds beside it: texts, an embedding, the parts' headers.
VOICE_MAX_BYTES = DEFAULT_LIMITS.max_bytes + _MIB
_MAX_MESSAGE_CHARS = 2000  # which quote what a client sent
# Texts in JSON, each with a limit of its own.
CHANGES_MAX_BYTES = 64 * 1024
# A clip in base64, and 1 MiB of text and options.
SPEECH_MAX_BYTES = -(-DEFAULT_LIMITS.max_bytes // 3) * 4 + _MIB
# A batch has 32 items by the host's default; few of them bring a clip of their own.
BATCH_MAX_BYTES = 64 * _MIB


class GuardedRoute(APIRoute):
    """Asks for a key, and maps our errors here.

    The host's application owns its exception handlers, and knows keys, but no tenants.
    """

    body_max_bytes = _MIB
    check_json: Callable[[object], None] | None = None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler that FastAPI made."""
        handle = super().get_route_handler()
        of_body = None if self.body_field is None else self.body_field.field_info
        is_form = isinstance(of_body, params.Form)

        async def bounded(request: Request) -> Response:
            body = BoundedBody(request, self.body_max_bytes, is_form=is_form)
            body.check()
            try:
                answer = await handle(_Request(request, body, type(self).check_json))
            except HTTPException as exc:
                # FastAPI takes what goes wrong while it reads for a body that is
                # wrong: a body without end, or a full disk to spool an upload to.
                raise body.error or _error_behind(exc) from exc
            body.check()
            return answer

        async def guarded(request: Request) -> Response:
            try:
                request.state.caller = caller_of(request)
                return await self.counted(bounded(request))
            except TTSCacheError as exc:
                return self._answer(request, exc)

        return guarded

    async def counted(self, handled: Awaitable[Response]) -> Response:
        """Count what is asked of the route: here nothing."""
        return await handled

    def _answer(self, request: Request, error: TTSCacheError) -> Response:
        if is_server_fault(status_of(error)):
            cause = f"answering: {type(error).__name__}"
            # Not the path that was called, which may name a voice.
            where = request.method, self.path
            throttled.warn_of(cause, "%s %s: %s", *where, error.log_text)
        return json_response(error)


class _Request(Request):
    """One whose JSON is looked at before anybody makes something of it."""

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
        if self._check is not None:
            self._check(given)
        return given


def guarded_route(
    body_max_bytes: int,
    kind: type[GuardedRoute] = GuardedRoute,
    check_json: Callable[[object], None] | None = None,
) -> type[GuardedRoute]:
    """Return the route class whose bodies have at most so many bytes.

    Args:
        body_max_bytes: How many.
        kind: What the class is one of.
        check_json: Refuses, by a `SpeakerRequestError`, what JSON may not say.
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
    if isinstance(cause, UnicodeEncodeError):
        # The host answers with the text that it refuses, and cannot.
        return InvalidSpeakerError(
            "text", "a field contains an unpaired surrogate, which is not a character"
        )
    raise FastAPIHTTPException(exc.status_code, exc.detail, exc.headers) from exc


class NoSpeechModelError(SpeakerRequestError):
    """The served model has no speech API."""

    def __init__(self) -> None:
        super().__init__("The model does not support Speech API")


# The first class that fits decides.
_ROUTE_STATUS: tuple[tuple[type[Exception], HTTPStatus], ...] = (
    (UnauthorizedError, HTTPStatus.UNAUTHORIZED),
    (AdminKeyError, HTTPStatus.FORBIDDEN),
    (OtherSiteError, HTTPStatus.FORBIDDEN),
    (NoSpeechModelError, HTTPStatus.NOT_FOUND),
    (SpeakerNotFoundError, HTTPStatus.NOT_FOUND),
    (PreviewNotFoundError, HTTPStatus.NOT_FOUND),
    (ConsentNotFoundError, HTTPStatus.NOT_FOUND),
    (ConsentInUseError, HTTPStatus.CONFLICT),
    (ConsentLimitError, HTTPStatus.CONFLICT),
    (SpeakerExistsError, HTTPStatus.CONFLICT),
    (SpeakerLimitError, HTTPStatus.CONFLICT),
    (PinLimitError, HTTPStatus.CONFLICT),
    (AudioBudgetError, HTTPStatus.CONFLICT),
    (DownloadsOffError, HTTPStatus.FORBIDDEN),
    (RequestTooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (SpeakerRequestError, HTTPStatus.BAD_REQUEST),
    (StorageFullError, HTTPStatus.INSUFFICIENT_STORAGE),
    (StorageBusyError, HTTPStatus.SERVICE_UNAVAILABLE),
    (StorageUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE),
    (ObjectStoreError, HTTPStatus.SERVICE_UNAVAILABLE),
    (ServerBusyError, HTTPStatus.SERVICE_UNAVAILABLE),
    (DeletionPendingError, HTTPStatus.SERVICE_UNAVAILABLE),
    (EncodeTimeoutError, HTTPStatus.SERVICE_UNAVAILABLE),
    (SpeakerReplacedError, HTTPStatus.SERVICE_UNAVAILABLE),
    (WorkerBusyError, HTTPStatus.SERVICE_UNAVAILABLE),
    (ServerFaultError, HTTPStatus.INTERNAL_SERVER_ERROR),
)


def status_of(error: Exception) -> HTTPStatus:
    """Return the status that a voices route answers this error with."""
    for kind, status in _ROUTE_STATUS:
        if isinstance(error, kind):
            return status
    return HTTPStatus.INTERNAL_SERVER_ERROR


def error_response(error: Exception) -> ErrorResponse:
    """Return the error of a speech request, as the host's serving class does.

    An unknown voice is a wrong field here, not a missing resource.
    """
    status = status_of(error)
    if status is HTTPStatus.NOT_FOUND:
        status = HTTPStatus.BAD_REQUEST
    return bounded_error_response(str(error), _kind(status), status)


def bounded_error_response(
    message: str | Exception, *args: Any, **kwargs: Any
) -> ErrorResponse:
    """Return the host's, which goes through a message by the square of its length."""
    if isinstance(message, str):
        message = message[:_MAX_MESSAGE_CHARS]
    return create_error_response(message, *args, **kwargs)


def json_response(error: Exception, **details: Any) -> JSONResponse:
    """Return the answer of a voices route; ``details`` go beside ``error``."""
    status = status_of(error)
    body = bounded_error_response(str(error), _kind(status), status).model_dump()
    headers = retry_after(error)
    if status is HTTPStatus.UNAUTHORIZED:
        headers = {"WWW-Authenticate": "Bearer"}
    return JSONResponse({**body, **details}, status_code=status.value, headers=headers)


def pending_response(error: DeletionPendingError) -> JSONResponse:
    """Return the answer of a DELETE that goes on: how far it is."""
    progress = {"files_removed": error.files_removed, "waiting_for": error.waiting_for}
    return json_response(error, deletion=progress)


def speech_response(error: Exception) -> JSONResponse:
    """Return the answer of a speech route: as `error_response`, and when to retry."""
    body = error_response(error)
    return JSONResponse(
        body.model_dump(), status_code=body.error.code, headers=retry_after(error)
    )


def retry_after(error: Exception) -> dict[str, str] | None:
    """Return the header that tells a client when it is worth trying again."""
    seconds = getattr(error, "retry_after_seconds", None)
    return None if seconds is None else {"Retry-After": str(seconds)}


def is_server_fault(status: HTTPStatus) -> bool:
    """Tell whether a status says that the request was fine (5xx)."""
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _kind(status: HTTPStatus) -> str:
    kinds = {
        HTTPStatus.NOT_FOUND: "NotFoundError",
        HTTPStatus.CONFLICT: "ConflictError",
        HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    }
    if is_server_fault(status):
        return "InternalServerError"
    return kinds.get(status, "BadRequestError")
