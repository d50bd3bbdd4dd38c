"""What our routes use of the host's HTTP server: error answers, keys, cancellation.

If FastAPI or pydantic refuse a request, the host answers with Python's text of each of
their errors, which repeats the request: for a clip sent as text, its first bytes.
`invalid_request` writes sentences instead, with the host's names of fields.
"""

import re
from collections.abc import Awaitable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)
from vllm.entrypoints.serve.exception_handling.handlers.validation import (
    clean_loc_for_param,
)
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from vllm_tts_cache.errors import SpeakerRequestError
from vllm_tts_cache.logs import encodable

_MAX_MESSAGE_CHARS = 2000  # messages may quote what a client sent
_MAX_FIELDS = 5
_MAX_FIELD_CHARS = _MAX_VALUE_CHARS = 64
_MAX_REASON_CHARS = 300
_AS_FILE = "as a file: its part of the form needs a filename (curl: -F {}=@clip.wav)"
# How pydantic's messages begin that name the expected type or form of a value.
_SUBJECT = re.compile(r"^(?:Input|String|List|Dictionary|Tuple|Value) should ")
_SHOULD = "it should "
_VALUE_ERRORS = "value_error", "assertion_error"

T = TypeVar("T")


def bounded_error_response(
    message: str | Exception, *args: Any, **kwargs: Any
) -> ErrorResponse:
    """Return the host's error of a cut text: its time grows by the length's square."""
    if isinstance(message, str):
        message = message[:_MAX_MESSAGE_CHARS]
    return create_error_response(message, *args, **kwargs)


def wants_key(app: FastAPI) -> bool:
    """Whether the host answers only requests that show its ``--api-key``."""
    return any(each.cls is AuthenticationMiddleware for each in app.user_middleware)


async def unless_client_leaves(request: Request, work: Awaitable[T]) -> T | None:
    """Return what ``work`` returns; cancel it, and return None, if the client leaves.

    The request's body has been read: what arrives later is dropped.
    """

    @with_cancellation
    async def run(*, raw_request: Request) -> T:
        del raw_request
        return await work

    return await run(raw_request=request)


class InvalidRequestError(SpeakerRequestError):
    """Fields of a request are missing or wrong; ``param`` is the place of the first."""

    def __init__(self, message: str, param: str | None):
        super().__init__(message)
        self.param = param


def invalid_request(
    errors: Iterable[Any], *, is_form: bool, files: Container[str]
) -> InvalidRequestError:
    """Return the error that says in sentences which fields are wrong.

    ``errors`` are those in FastAPI's exception: pydantic's, or texts. ``files`` names
    the form's fields that are files.
    """
    params: list[str] = []
    reasons: dict[str, list[str]] = {}
    shown: dict[str, str] = {}
    for error in errors:
        if not isinstance(error, Mapping):
            reasons.setdefault("request", []).append(str(error)[:_MAX_REASON_CHARS])
            continue
        params.append(clean_loc_for_param(error["loc"]))
        field, reason = _field(error["loc"], files), _reason(error, is_form, files)
        if reason.startswith(_SHOULD):
            shown[field] = f"{_shown(error.get('input'))} was sent, and "
        known = reasons.setdefault(field, [])
        if reason not in known:  # each type that a field may have is an error
            known.append(reason)
    sentences = [
        f"Invalid {field}: {shown.get(field, '')}{' or '.join(found).rstrip('.')}."
        for field, found in reasons.items()
    ]
    if (num_more := len(sentences) - _MAX_FIELDS) > 0:
        sentences[_MAX_FIELDS:] = [f"{num_more} more fields are wrong."]
    param = encodable(params[0]) if params else None
    return InvalidRequestError(encodable(" ".join(sentences)), param)


def _field(loc: Sequence[Any], files: Container[str]) -> str:
    if len(loc) < 2 or (loc[0] == "body" and isinstance(loc[1], int)):
        return str(loc[0])  # the whole part, or a place in invalid JSON
    if loc[1] in files:
        return str(loc[1])
    return clean_loc_for_param(tuple(loc[1:]))[:_MAX_FIELD_CHARS]


def _reason(error: Mapping[str, Any], is_form: bool, files: Container[str]) -> str:
    kind, loc = error["type"], error["loc"]
    name = loc[1] if len(loc) > 1 else None
    context = error.get("ctx") or {}
    if kind == "missing":
        return f"it is missing. Send it {_place(loc, is_form, files)}"
    if name is not None and name in files:
        return f"it is no file. Send it {_AS_FILE.format(name)}"
    if kind in _VALUE_ERRORS:
        return str(context.get("error", error["msg"]))[:_MAX_REASON_CHARS]
    if name is None:
        return "it is no JSON object. Send one, as Content-Type: application/json"
    if kind == "json_invalid":
        return f"it is not JSON ({context.get('error')}, character {name})"
    if kind == "extra_forbidden":
        return "there is no such field here. Leave it out, or correct its name"
    return _SUBJECT.sub(_SHOULD, error["msg"])[:_MAX_REASON_CHARS]


def _place(loc: Sequence[Any], is_form: bool, files: Container[str]) -> str:
    if loc[0] != "body":
        return f"in the {loc[0]}"
    if len(loc) < 2:
        return "as a JSON object, as Content-Type: application/json"
    if loc[1] in files:
        return _AS_FILE.format(loc[1])
    return "as a field of the form" if is_form else "in the JSON body"


def _shown(value: object) -> str:
    if isinstance(value, str) and len(value) > _MAX_VALUE_CHARS:
        return f"{value[:_MAX_VALUE_CHARS]!r}…"
    if value is None or isinstance(value, (str, bool, float)):
        return "null" if value is None else repr(value)
    if isinstance(value, int):  # Python writes no number of more than 4,300 digits
        return str(value) if value.bit_length() < _MAX_VALUE_CHARS else "a large number"
    return "a list" if isinstance(value, list) else "an object"
