"""What the OpenAPI document says that a route answers: models, examples, errors."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import BaseModel, Field

from vllm_tts_cache.entrypoints.http import models
from vllm_tts_cache.entrypoints.http.models import Answer


class Registry(Answer):
    """What is registered; of one tenant of several, what the tenant has."""

    speakers: int
    consents: int | None = None
    audio_bytes: int | None = None


class TenantLimits(Answer):
    """What a tenant may have; null is what all together may."""

    speakers: int | None
    consents: int | None
    audio_bytes: int | None


class Files(Answer):
    """Files of one kind."""

    files: int
    bytes: int


class Segment(Answer):
    """Audio and what was made of it."""

    audio: Files
    encodings: Files


class Storage(Answer):
    """What is stored, as the catalogue adds it up."""

    registered: Segment
    inline: Segment
    max_bytes: dict[str, int]


class Unfinished(Answer):
    """Deletions of which something is left to do."""

    unfinished: int


class KVWarmings(Answer):
    """Voices that are prefilled before their first text, in this process."""

    warmed: int
    waiting: int


class TenantCache(Answer):
    """What one tenant of several has, and may have."""

    registry: Registry
    limits: TenantLimits
    deletions: Unfinished


class Worker(Answer):
    """One worker's counters since its start, and sizes; by the model there are more."""

    rank: int
    encodes: dict[str, int] = Field(description="by encoder")
    failed_encodes: dict[str, int]
    prompts: int
    failed_prompts: int = Field(description="0 on a healthy server")


class DecoderStates(Answer):
    """What a worker of the codec decoder keeps of voices."""

    rank: int
    states: int
    bytes: int
    max_bytes: int
    hits: int
    made: int


class SpeakerCache(Answer):
    """What there is: all of it, or to a tenant's key what the tenant has."""

    registry: Registry
    deletions: Unfinished
    limits: TenantLimits | None = Field(default=None, description="to a tenant's key")
    storage: Storage | None = None
    bucket: dict[str, int] | None = Field(
        default=None, description="files of an object store, where there is one"
    )
    flights: int | None = Field(
        default=None, description="encodings that callers of this process wait for"
    )
    workers: list[Worker] | None = None
    decoders: list[DecoderStates] | None = None
    kv_warming: KVWarmings | None = None
    tenants: dict[str, TenantCache] | None = Field(
        default=None, description="to an administrator's key"
    )


VOICE_ID = "voice_5f0c2b9a64d1473e8a1b2c3d4e5f6071"
CONSENT_ID = "cons_0b7d3c52a1e94f6f9d8e7c6b5a493827"
_CREATED = 1793491200

_SHORT_VOICE = {
    "id": VOICE_ID,
    "object": "audio.voice",
    "created_at": _CREATED,
    "name": "keeper",
    "type": "audio_sample",
}
_VOICE = {
    **_SHORT_VOICE,
    "consent": "signed 2026-11-01",
    "file_size": 81234,
    "mime_type": "audio/flac",
    "embedding_source": "audio",
    "embedding_dim": None,
    "ref_text": "The keeper counts the ships at dusk.",
    "generation": 7,
    "audio_sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "sample_rate": 24000,
    "duration_seconds": 4.5,
    "labels": {"team": "news"},
    "language": "en-GB",
}
_QUALITY = {
    "verdict": "fair",
    "reasons": [
        {"code": "noisy", "message": "Noise is heard behind the voice. Record again."}
    ],
    "duration_seconds": 4.5,
    "speech_seconds": 3.9,
    "speech_share": 0.867,
    "longest_pause_seconds": 0.4,
    "loudness_lufs": -21.3,
    "peak_dbfs": -3.2,
    "clipped_share": 0.0,
    "noise_dbfs": -48.0,
    "snr_db": 24.5,
    "bandwidth_hz": 11000,
}
_CONSENT = {
    "id": CONSENT_ID,
    "object": "audio.voice_consent",
    "created_at": _CREATED,
    "name": "Ann's consent",
    "language": "en-US",
}
_NO_FILES = {"files": 0, "bytes": 0}
_CACHE = {
    "registry": {"speakers": 2},
    "storage": {
        "registered": {
            "audio": {"files": 2, "bytes": 81920},
            "encodings": {"files": 3, "bytes": 9216},
        },
        "inline": {"audio": _NO_FILES, "encodings": _NO_FILES},
        "max_bytes": {
            "registered_audio": 21474836480,
            "inline_audio": 1073741824,
            "encodings": 21474836480,
        },
    },
    "deletions": {"unfinished": 0},
    "flights": 0,
    "workers": [
        {
            "rank": 0,
            "encodes": {"speaker": 2, "codec": 1},
            "failed_encodes": {"speaker": 0, "codec": 0},
            "prompts": 14,
            "failed_prompts": 0,
        }
    ],
}

EXAMPLES: Mapping[type[BaseModel], dict[str, Any]] = {
    models.Registered: {
        "success": True,
        "voice": _VOICE,
        **_SHORT_VOICE,
        "quality": _QUALITY,
    },
    models.VoiceStatus: {
        "voice": _VOICE,
        "cache_status": "ready",
        "modes": ["x_vector", "in_context"],
    },
    models.VoiceList: {
        "voices": ["default", "keeper"],
        "uploaded_voices": [_VOICE],
        "max_clips": 1,
    },
    models.CacheStatus: {"voice": "keeper", "cache_status": "ready"},
    models.Quality: _QUALITY,
    models.Imported: {
        "imported": [{"voice": _VOICE, "encodings_kept": 2, "encodings_left": 0}]
    },
    models.VoiceDeleted: {
        "success": True,
        "message": "Voice 'keeper' deleted successfully",
        "id": VOICE_ID,
        "object": "audio.voice.deleted",
        "deleted": True,
    },
    models.Consent: _CONSENT,
    models.ConsentList: {
        "object": "list",
        "data": [_CONSENT],
        "first_id": CONSENT_ID,
        "last_id": CONSENT_ID,
        "has_more": False,
    },
    models.ConsentDeleted: {
        "id": CONSENT_ID,
        "object": "audio.voice_consent",
        "deleted": True,
    },
    SpeakerCache: _CACHE,
}

HEAD = "The headers that a GET answers with: how long the file is, and its `ETag`."

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
    416: "`Range` begins behind the end; `Content-Range` has the length",
    500: "the server failed",
    503: "something is at its bound, or away; `Retry-After` says when to come back",
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


def part_answers(media_types: Sequence[str], *statuses: int) -> Answers:
    """Return what a route answers that gives a file, or the bytes that Range names."""
    whole = file_answers(media_types, *statuses, 416)
    part = {**whole[200], "description": "the bytes that `Range` asks for"}
    return {**whole, 206: part}


def head_answers(*statuses: int) -> Answers:
    """Return what the same route answers a HEAD."""
    return {200: {"description": "the headers of the file"}, **refusals(*statuses)}


def refusals(*statuses: int) -> Answers:
    """Return the errors of a route: those of all, and these."""
    errors: Answers = {
        status: {
            "model": Unauthorized if status == 401 else Error,
            "description": _WHEN[status],
        }
        for status in sorted({*_OF_ALL, *statuses})
    }
    # FastAPI documents a 422 in a shape of its own otherwise, which no route answers.
    return {**errors, "4XX": {"model": Error, "description": "refused otherwise"}}
