"""Our errors as HTTP answers, in the host's JSON shape."""

from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)

from vllm_tts_cache.errors import (
    AudioBudgetError,
    DeletionPendingError,
    EncodeTimeoutError,
    RequestTooLargeError,
    ServerBusyError,
    ServerFaultError,
    SpeakerExistsError,
    SpeakerLimitError,
    SpeakerNotFoundError,
    SpeakerRequestError,
    StorageBusyError,
    StorageFullError,
)


class NoSpeechModelError(SpeakerRequestError):
    """The served model has no speech API."""

    def __init__(self) -> None:
        super().__init__("The model does not support Speech API")


# The first class that fits decides.
_ROUTE_STATUS: tuple[tuple[type[Exception], HTTPStatus], ...] = (
    (NoSpeechModelError, HTTPStatus.NOT_FOUND),
    (SpeakerNotFoundError, HTTPStatus.NOT_FOUND),
    (SpeakerExistsError, HTTPStatus.CONFLICT),
    (SpeakerLimitError, HTTPStatus.CONFLICT),
    (AudioBudgetError, HTTPStatus.CONFLICT),
    (RequestTooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (SpeakerRequestError, HTTPStatus.BAD_REQUEST),
    (StorageFullError, HTTPStatus.INSUFFICIENT_STORAGE),
    (StorageBusyError, HTTPStatus.SERVICE_UNAVAILABLE),
    (ServerBusyError, HTTPStatus.SERVICE_UNAVAILABLE),
    (DeletionPendingError, HTTPStatus.SERVICE_UNAVAILABLE),
    (EncodeTimeoutError, HTTPStatus.SERVICE_UNAVAILABLE),
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
    return create_error_response(str(error), _kind(status), status)


def json_response(error: Exception, **details: Any) -> JSONResponse:
    """Return the answer of a voices route; ``details`` go beside ``error``."""
    status = status_of(error)
    body = create_error_response(str(error), _kind(status), status).model_dump()
    return JSONResponse(
        {**body, **details}, status_code=status.value, headers=retry_after(error)
    )


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
    }
    if is_server_fault(status):
        return "InternalServerError"
    return kinds.get(status, "BadRequestError")
