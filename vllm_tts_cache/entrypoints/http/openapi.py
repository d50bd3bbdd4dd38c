"""The answers of routes in the OpenAPI document: models, examples, errors."""

from collections.abc import Sequence
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from fastapi import Path
from pydantic import BaseModel, Field

from vllm_tts_cache.entrypoints.http.models import CONSENT_ID, VOICE_ID, Answer


class Held(Answer):
    """Counts, or limits; null where only the limit of all tenants together holds."""

    speakers: int | None = Field(examples=[2])
    consents: int | None = None
    audio_bytes: int | None = None


class Files(Answer):
    """Files of one kind."""

    files: int = Field(examples=[3])
    bytes: int = Field(examples=[9216])


class Segment(Answer):
    """Audio and what was made of it."""

    audio: Files
    encodings: Files


class Storage(Answer):
    """What is stored, as the catalogue adds it up."""

    registered: Segment
    inline: Segment
    max_bytes: dict[str, int] = Field(examples=[{"registered_audio": 21474836480}])


class Unfinished(Answer):
    """Deletions of which something is left to do."""

    unfinished: int = Field(examples=[0])


class KVWarmings(Answer):
    """Voices that are prefilled before their first text, in this process."""

    warmed: int
    waiting: int


class TenantCache(Answer):
    """What one tenant of several has, and may have."""

    registry: Held
    deletions: Unfinished
    limits: Held | None = Field(default=None, description="shown to a tenant's key")


class Worker(Answer):
    """One worker's counters since its start, and sizes; some models have more."""

    rank: int = Field(examples=[0])
    encodes: dict[str, int] = Field(
        description="by encoder", examples=[{"speaker": 2, "codec": 1}]
    )
    failed_encodes: dict[str, int] = Field(examples=[{"speaker": 0, "codec": 0}])
    prompts: int = Field(examples=[14])
    failed_prompts: int = Field(description="0 on a healthy server", examples=[0])


class DecoderStates(Answer):
    """What a worker of the codec decoder keeps of voices."""

    rank: int
    states: int
    bytes: int
    max_bytes: int
    hits: int
    made: int


class SpeakerCache(TenantCache):
    """Counts of the server; to a tenant's key, of that tenant."""

    storage: Storage | None = None
    bucket: dict[str, int] | None = Field(
        default=None, description="files of an object store, where there is one"
    )
    flights: int | None = Field(
        default=None,
        description="encodings that callers of this process wait for",
        examples=[0],
    )
    workers: list[Worker] | None = None
    decoders: list[DecoderStates] | None = None
    kv_warming: KVWarmings | None = None
    tenants: dict[str, TenantCache] | None = Field(
        default=None, description="shown to an administrator's key"
    )


def example_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return an answer made of the examples of a model's fields, where it has some."""
    shown: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        types = [each for each in get_args(field.annotation) if each is not NoneType]
        shape = types[0] if len(types) == 1 else field.annotation
        is_list = list in (get_origin(field.annotation), get_origin(shape))
        inner = get_args(shape)[0] if get_origin(shape) is list else shape
        example = None
        if field.examples:
            [shown[name], *_] = field.examples
        elif get_origin(field.annotation) is Literal:
            shown[name] = shape
        elif isinstance(inner, type) and issubclass(inner, Answer):
            example = example_of(inner)
        if example:
            shown[name] = [example] if is_list else example
    return shown


HEAD = "The headers that a GET answers with: how long the file is, and its `ETag`."

Answers = dict[int | str, dict[str, Any]]

VoiceName = Annotated[
    str, Path(description="its name, an alias or its id", examples=["keeper", VOICE_ID])
]
ConsentId = Annotated[str, Path(description="its id", examples=[CONSENT_ID])]

_WHEN = {
    400: "a field, or what it says, is wrong",
    401: "no key, or one that the server does not know",
    403: "not allowed with this key, from this page, or by the operator's settings",
    404: "there is no such voice or recording",
    409: "it conflicts with what is registered, or with a limit; nothing was changed",
    413: "the body is too large",
    416: "`Range` begins behind the end; `Content-Range` has the length",
    500: "the server failed",
    503: "busy, or a part is out of reach; `Retry-After` says when to try again",
    507: "the disk is full; nothing was changed",
}
_OF_ALL = (400, 401, 403, 503)


class ErrorDetails(Answer):
    """What is wrong, and what to do."""

    message: str = Field(examples=["Voice 'ann' is not registered. ..."])
    type: str = Field(examples=["NotFoundError"])
    code: int = Field(description="the HTTP status", examples=[404])
    param: str | None = None


class Error(Answer):
    """An error in the host's shape."""

    error: ErrorDetails


class Unauthorized(BaseModel):
    """An error in the host's shape, or one word if the host has refused the key."""

    error: ErrorDetails | Literal["Unauthorized"]


def answers(model: type[BaseModel], *statuses: int) -> Answers:
    """Return a route's answers: JSON, these errors, and those of all routes."""
    example = {"application/json": {"example": example_of(model)}}
    return {200: {"model": model, "content": example}, **refusals(*statuses)}


def file_answers(media_types: Sequence[str], *statuses: int) -> Answers:
    """Return the answers of a route that sends a file."""
    schema = {"type": "string", "format": "binary"}
    content = {media_type: {"schema": schema} for media_type in media_types}
    found = {"content": content, "description": "the file"}
    return {200: found, **refusals(*statuses)}


def part_answers(media_types: Sequence[str], *statuses: int) -> Answers:
    """Return the answers of a route that sends a file, or a range of its bytes."""
    whole = file_answers(media_types, *statuses, 416)
    part = {**whole[200], "description": "the bytes that `Range` asks for"}
    return {**whole, 206: part}


def refusals(*statuses: int) -> Answers:
    """Return the errors of a route: those of all, and these."""
    errors: Answers = {
        status: {
            "model": Unauthorized if status == 401 else Error,
            "description": _WHEN[status],
        }
        for status in sorted({*_OF_ALL, *statuses})
    }
    # Without a 4XX FastAPI documents a 422 in its own shape, which no route answers.
    return {**errors, "4XX": {"model": Error, "description": "refused otherwise"}}
