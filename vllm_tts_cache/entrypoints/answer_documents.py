"""What the OpenAPI document says that a route answers: models, examples, errors."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field

from vllm_tts_cache.entrypoints.answer_examples import CONSENT_ID, EXAMPLES, VOICE_ID

Answers = dict[int | str, dict[str, Any]]

VoiceName = Annotated[
    str, Path(description="its name or its id", examples=["keeper", VOICE_ID])
]
ConsentId = Annotated[str, Path(description="its id", examples=[CONSENT_ID])]

_WHEN = {
    400: "a field, or what it says, is wrong",
    401: "no key, or one that the server does not know",
    403: "not with this key, or from this page, or by this operator's settings",
    404: "there is none",
    409: "it stands against what there is, or is beyond a limit; nothing was changed",
    413: "the body is too large",
    500: "the server failed",
    503: "something is at its bound, or away; `Retry-After` says when to come back",
    507: "the disk is full; nothing was changed",
}
_OF_ALL = (400, 401, 403, 503)


class ErrorDetails(BaseModel):
    """What is wrong, and what to do."""

    model_config = ConfigDict(extra="allow")

    message: str = Field(examples=["Voice 'ann' is not registered. ..."])
    type: str = Field(examples=["NotFoundError"])
    code: int = Field(description="the HTTP status", examples=[404])
    param: str | None = None


class Error(BaseModel):
    """An error in the host's shape."""

    model_config = ConfigDict(extra="allow")

    error: ErrorDetails


class Unauthorized(BaseModel):
    """An error likewise, or the host's one word where it has looked at the key."""

    error: ErrorDetails | Literal["Unauthorized"]


def answers(model: type[BaseModel], *statuses: int) -> Answers:
    """Return what a route answers in JSON, and how else than all of ours it refuses."""
    example = {"application/json": {"example": EXAMPLES[model]}}
    return {200: {"model": model, "content": example}, **refusals(*statuses)}


def file_answers(media_types: Sequence[str], *statuses: int) -> Answers:
    """Return what a route answers that gives a file."""
    schema = {"type": "string", "format": "binary"}
    content = {media_type: {"schema": schema} for media_type in media_types}
    found = {"content": content, "description": "the file"}
    return {200: found, **refusals(*statuses)}


def refusals(*statuses: int) -> Answers:
    """Return the errors of a route: those of all, and these."""
    errors: Answers = {
        status: {
            "model": Unauthorized if status == 401 else Error,
            "description": _WHEN[status],
        }
        for status in sorted({*_OF_ALL, *statuses})
    }
    # FastAPI documents a 422 in a shape of its own otherwise, which nobody is answered.
    return {**errors, "4XX": {"model": Error, "description": "refused otherwise"}}
