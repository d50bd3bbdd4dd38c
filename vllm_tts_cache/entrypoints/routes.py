"""The voices routes: stock's paths and fields, and ours beside them."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, File, Form, Query, Request, UploadFile
from fastapi.responses import JSONResponse

from vllm_tts_cache.audio.limits import DEFAULT_LIMITS
from vllm_tts_cache.catalogue.names import fold
from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.entrypoints import http_errors, models
from vllm_tts_cache.entrypoints.embedding_form import parse_embedding
from vllm_tts_cache.entrypoints.guarded_route import GuardedRoute
from vllm_tts_cache.entrypoints.service import SpeakerService, Upload
from vllm_tts_cache.entrypoints.serving import CachedServingSpeech
from vllm_tts_cache.errors import (
    InvalidAudioError,
    InvalidSpeakerError,
    ServerFaultError,
)

router = APIRouter(route_class=GuardedRoute)

MAX_PAGE = 1000
_MIB = 1024 * 1024


def _handler(request: Request) -> CachedServingSpeech:
    handler = getattr(request.app.state, "openai_serving_speech", None)
    if not isinstance(handler, CachedServingSpeech):
        raise http_errors.NoSpeechModelError
    return handler


Handler = Annotated[CachedServingSpeech, Depends(_handler)]


def _upload(
    name: Annotated[str, Form()],
    consent: Annotated[str, Form()],
    ref_text: Annotated[str | None, Form()] = None,
    speaker_description: Annotated[str | None, Form()] = None,
) -> Upload:
    if not consent.strip():
        raise InvalidSpeakerError("consent", "it must not be empty")
    return Upload(
        name=name,
        consent=consent,
        ref_text=(ref_text or "").strip() or None,
        description=(speaker_description or "").strip() or None,
    )


@router.post("/v1/audio/voices")
async def register_voice(
    handler: Handler,
    upload: Annotated[Upload, Depends(_upload)],
    audio_sample: Annotated[UploadFile | None, File()] = None,
    speaker_embedding: Annotated[str | None, Form()] = None,
    precompute: Annotated[bool, Form()] = True,
) -> Any:
    """Register a voice by a reference clip or by a raw speaker embedding.

    Registering over an existing name replaces it, unless the policy is `immutable`.
    With `precompute` (the default) its encodings are made in the background.
    """
    _refuse_builtin_name(handler, upload.name)
    handler.check_upload(upload)
    if (audio_sample is None) == (speaker_embedding is None):
        reason = "give either audio_sample or speaker_embedding"
        raise InvalidSpeakerError("audio_sample", reason)
    if audio_sample is not None:
        upload = _with_file(upload, audio_sample)
        data = await _read(audio_sample)
        done = await handler.speakers.register_audio(
            upload, data, precompute=precompute
        )
    else:
        embedding = parse_embedding(speaker_embedding or "", handler)
        done = await handler.speakers.register_embedding(upload, embedding)
    answer: dict[str, Any] = {"success": True, "voice": models.voice(done.record)}
    if done.warnings:
        answer["warnings"] = models.warnings(done.warnings)
    return answer


@router.get("/v1/audio/voices")
async def list_voices(
    handler: Handler,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    after: str | None = None,
    search: str | None = None,
    names_only: bool = False,
) -> Any:
    """List voices by name: stock's two lists, a page of at most `limit` at a time.

    `next` is there if more follow; give it as `after`. Built-in voices come with the
    first page.
    """
    page = await handler.speakers.list(limit=limit, after=after, search=search)
    builtin = set() if after else handler.builtin_names | {"default"}
    if search:
        builtin = {name for name in builtin if fold(search) in fold(name)}
    answer: dict[str, Any] = {
        "voices": sorted(builtin | {record.name for record in page})
    }
    if not names_only:
        answer["uploaded_voices"] = [models.voice(record) for record in page]
    if len(page) == limit:
        answer["next"] = page[-1].name
    return answer


@router.get("/v1/audio/voices/{name}")
async def get_voice(handler: Handler, name: str) -> Any:
    """Show one voice and the state of its encodings."""
    record = await handler.speakers.get(name)
    status = await _status(handler.speakers, record)
    return {**status, "voice": models.voice(record)}


@router.delete("/v1/audio/voices/{name}")
async def delete_voice(handler: Handler, name: str) -> Any:
    """Delete a voice; answers when nothing of it is left in any worker."""
    record = await handler.speakers.delete(name)
    message = f"Voice '{record.name}' deleted successfully"
    return {"success": True, "message": message}


@router.post("/v1/audio/voices/{name}/cache")
async def precompute_voice(handler: Handler, name: str, force: bool = False) -> Any:
    """Make the voice's encodings exist and wait for it; one flight for all callers."""
    record = await handler.speakers.get(name)
    answer = {"voice": record.name, "cache_status": "ready"}
    try:
        existed = await handler.speakers.precompute(record, force=force)
    except ServerFaultError as exc:
        details = {"voice": record.name, "cache_status": "failed"}
        return http_errors.json_response(exc, **details)
    if existed:
        answer["message"] = "The cache already exists and is valid."
    return answer


@router.get("/v1/audio/voices/{name}/cache")
async def cache_status(handler: Handler, name: str) -> Any:
    """Show whether the voice's encodings exist."""
    return await _status(handler.speakers, await handler.speakers.get(name))


@router.get("/v1/audio/speaker_cache")
async def speaker_cache(handler: Handler) -> Any:
    """Show the registry's count and, per worker and tier, counters and sizes."""
    return JSONResponse(await handler.speakers.stats())


async def _status(speakers: SpeakerService, record: SpeakerRecord) -> dict[str, Any]:
    status, error = await speakers.status(record)
    shown = {"voice": record.name, "cache_status": status}
    return shown if error is None else {**shown, "error": error}


async def _read(file: UploadFile) -> bytes:
    # One byte more than allowed is enough to know.
    data = await file.read(DEFAULT_LIMITS.max_bytes + 1)
    if len(data) > DEFAULT_LIMITS.max_bytes:
        size = "" if file.size is None else f"it has {file.size / _MIB:.1f} MiB, "
        allowed = f"allowed are {DEFAULT_LIMITS.max_bytes / _MIB:.0f} MiB"
        raise InvalidAudioError(f"{size}{allowed}")
    return data


def _with_file(upload: Upload, file: UploadFile) -> Upload:
    return Upload(
        name=upload.name,
        consent=upload.consent,
        ref_text=upload.ref_text,
        description=upload.description,
        mime_type=file.content_type,
        original_filename=file.filename,
    )


def _refuse_builtin_name(handler: CachedServingSpeech, name: str) -> None:
    if fold(name) in {fold(builtin) for builtin in handler.builtin_names}:
        reason = f"{name!r} is a built-in voice of this model; choose another name"
        raise InvalidSpeakerError("name", reason)
