"""Answers of our routes: fields of stock, of OpenAI's and our own; for OpenAPI, too."""

from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from vllm_tts_cache.catalogue.records import SpeakerRecord
from vllm_tts_cache.entrypoints.speakers.served_model import CacheState
from vllm_tts_cache.store.consents import ConsentRecord

# A person's voice: no cache may store it, no browser may guess its type.
FILE_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

VOICE_ID = "voice_5f0c2b9a64d1473e8a1b2c3d4e5f6071"
CONSENT_ID = "cons_0b7d3c52a1e94f6f9d8e7c6b5a493827"


class Answer(BaseModel):
    """Documents an answer in OpenAPI; answers are not validated by it."""

    model_config = ConfigDict(extra="allow")


class VoiceClip(Answer):
    """One of several clips of a voice: a part of its audio."""

    start_seconds: float
    duration_seconds: float


class Voice(Answer):
    """A registered voice."""

    id: str = Field(examples=[VOICE_ID])
    object: Literal["audio.voice"]
    type: Literal["audio_sample"]
    name: str = Field(examples=["keeper"])
    consent: str = Field(description="as it was sent", examples=["recorded 2026-11-01"])
    consent_id: str | None = Field(
        default=None, description="the consent recording that it stands on"
    )
    created_at: int = Field(description="Unix seconds", examples=[1793491200])
    updated_at: int | None = None
    expires_at: int | None = Field(
        default=None, description="Unix seconds; it is deleted then"
    )
    file_size: int = Field(examples=[81234])
    mime_type: str = Field(examples=["audio/flac"])
    embedding_source: Literal["audio", "direct"] = Field(examples=["audio"])
    embedding_dim: int | None = Field(examples=[None])
    generation: int | None = Field(
        default=None,
        description="grows with every registration; not shown where there are tenants",
        examples=[7],
    )
    labels: dict[str, str] = Field(examples=[{"gender": "female"}])
    aliases: list[str] | None = Field(
        default=None, description="what else it is called by", examples=[["alloy"]]
    )
    settings: dict[str, Any] | None = Field(
        default=None,
        description="how it speaks where a request does not say",
        examples=[{"speed": 0.9}],
    )
    language: str | None = Field(default=None, examples=["de"])
    ref_text: str | None = None
    speaker_description: str | None = None
    audio_sha256: str | None = Field(
        default=None, description="content address of the reference audio"
    )
    sample_rate: int | None = Field(default=None, examples=[24000])
    duration_seconds: float | None = Field(
        default=None, description="of all clips together", examples=[4.5]
    )
    clips: list[VoiceClip] | None = Field(
        default=None, description="in their order; of a voice of several clips only"
    )
    audio_lost: Literal[True] | None = Field(
        default=None,
        description="its reference audio is not stored any more: register the clip "
        "again; not shown in lists",
    )


class Warned(Answer):
    """A warning: no error, but it may be audible, or a mistake."""

    code: str
    message: str


class Reason(Answer):
    """Something that speaks against a clip."""

    code: str = Field(examples=["noisy"])
    message: str = Field(
        description="what it is, and what to do", examples=["Noise is heard."]
    )


class Quality(Answer):
    """What a clip is worth; a figure that cannot be measured is null."""

    verdict: Literal["good", "fair", "poor"] = Field(examples=["fair"])
    reasons: list[Reason]
    duration_seconds: float = Field(examples=[4.5])
    speech_seconds: float = Field(examples=[3.9])
    speech_share: float = Field(examples=[0.867])
    longest_pause_seconds: float = Field(examples=[0.4])
    loudness_lufs: float | None = Field(examples=[-21.3])
    peak_dbfs: float | None = Field(examples=[-3.2])
    clipped_share: float = Field(examples=[0.0])
    noise_dbfs: float | None = Field(examples=[-48.0])
    snr_db: float | None = Field(examples=[24.5])
    bandwidth_hz: int | None = Field(examples=[11000])


class Registered(Answer):
    """A registration: the voice as stock shows it, and as OpenAI's client reads it."""

    success: Literal[True]
    voice: Voice
    id: str = Field(examples=[VOICE_ID])
    object: Literal["audio.voice"]
    type: Literal["audio_sample"]
    name: str = Field(examples=["keeper"])
    created_at: int = Field(examples=[1793491200])
    warnings: list[Warned] = Field(default_factory=list)
    quality: Quality | None = None
    note: str | None = None


class _Encoded(Answer):
    """Whether a voice's encodings exist."""

    cache_status: CacheState = Field(examples=["ready"])
    error: str | None = None
    attempts: int | None = Field(default=None, description="failed ones that were due")
    next_try_at: int | None = Field(default=None, examples=[1793491200])


class CacheStatus(_Encoded):
    """Whether a voice's encodings exist."""

    voice: str = Field(description="its name", examples=["keeper"])
    message: str | None = None


class VoiceStatus(_Encoded):
    """A voice and what it can be used for now."""

    voice: Voice
    modes: list[str] = Field(
        description="ways of cloning that need nothing more than the voice",
        examples=[["x_vector", "in_context"]],
    )


class NamedVoice(Answer):
    """A voice as clients of other servers read it."""

    id: str = Field(examples=["keeper"])
    object: Literal["audio.voice"]
    name: str = Field(examples=["keeper"])


class VoiceList(Answer):
    """A page of voices: stock's two lists, and where the next page begins."""

    voices: list[str] = Field(examples=[["default", "keeper"]])
    object: Literal["list"]
    data: list[NamedVoice] = Field(description="`voices`, for clients of other servers")
    uploaded_voices: list[Voice] = Field(default_factory=list)
    max_clips: int | None = Field(
        default=None,
        description="clips that the model takes for a voice; not with `names_only`",
        examples=[1],
    )
    next: str | None = Field(
        default=None, description="give it as `after`; missing on the last page"
    )


class ImportedVoice(Answer):
    """What became of a bundle."""

    voice: Voice
    encodings_kept: int = Field(
        description="taken from the bundle, or there before", examples=[2]
    )
    encodings_left: int = Field(
        description="not taken; the voice is encoded again", examples=[0]
    )


class Imported(Answer):
    """The voices of a bundle."""

    imported: list[ImportedVoice]


class VoiceDeleted(Answer):
    """The voice is deleted everywhere."""

    success: Literal[True]
    message: str = Field(examples=["Voice 'keeper' deleted successfully"])
    id: str = Field(examples=[VOICE_ID])
    object: Literal["audio.voice.deleted"]
    deleted: Literal[True]


class Consent(Answer):
    """A consent recording."""

    id: str = Field(examples=[CONSENT_ID])
    object: Literal["audio.voice_consent"]
    name: str = Field(examples=["Ann's consent"])
    language: str = Field(examples=["en-US"])
    created_at: int = Field(examples=[1793491200])


class ConsentList(Answer):
    """A page of consent recordings, newest first."""

    object: Literal["list"]
    data: list[Consent]
    first_id: str | None = Field(examples=[CONSENT_ID])
    last_id: str | None = Field(examples=[CONSENT_ID])
    has_more: bool = Field(examples=[False])


class ConsentDeleted(Answer):
    """The recording is deleted everywhere."""

    id: str = Field(examples=[CONSENT_ID])
    object: Literal["audio.voice_consent"]
    deleted: Literal[True]


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


def voice(
    record: SpeakerRecord, *, is_numbered: bool = True, is_lost: bool = False
) -> dict[str, Any]:
    """Return a voice as JSON, as lists show it: stock's fields first.

    If ``is_numbered``, with its generation, which counts all registrations.
    """
    has_audio = bool(record.audio_sha256)
    always = {
        "consent": record.consent,
        "file_size": record.file_size or 0,
        "mime_type": record.mime_type or "",
        "embedding_source": "audio" if has_audio else "direct",
        "embedding_dim": record.embedding_dim,
    }
    where_known = {
        "ref_text": record.ref_text or None,
        "speaker_description": record.description or None,
        "generation": record.generation if is_numbered else None,
        "audio_sha256": record.audio_sha256 or None,
        "sample_rate": record.sample_rate_hz if has_audio else None,
        "duration_seconds": round(record.seconds, 3) if has_audio else None,
        "audio_lost": is_lost or None,
        "clips": _clips(record) if record.num_clips > 1 else None,
        "labels": record.labels,
        "language": record.language,
        "consent_id": record.consent_id,
        "updated_at": _seconds(record.updated_at),
        "expires_at": _seconds(record.expires_at),
    }
    known = {name: value for name, value in where_known.items() if value is not None}
    return {**openai_voice(record), **always, **known, **record.extras}


def openai_voice(record: SpeakerRecord) -> dict[str, Any]:
    """Return as JSON what OpenAI's client reads of a voice."""
    return {
        "id": record.speaker_id,
        "object": "audio.voice",
        "created_at": int(record.created_at),
        "name": record.name,
        "type": "audio_sample",
    }


def consent(record: ConsentRecord) -> dict[str, Any]:
    """Return a consent recording as JSON."""
    return {
        "id": record.consent_id,
        "object": "audio.voice_consent",
        "created_at": int(record.created_at),
        "name": record.name,
        "language": record.language,
    }


def _clips(record: SpeakerRecord) -> list[dict[str, float]]:
    return [
        {
            "start_seconds": round(start / record.sample_rate_hz, 3),
            "duration_seconds": round(seconds, 3),
        }
        for start, seconds in zip(record.clip_starts, record.clip_seconds, strict=True)
    ]


def _seconds(moment: float | None) -> int | None:
    return None if moment is None else int(moment)


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


Answers = dict[int | str, dict[str, Any]]

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
