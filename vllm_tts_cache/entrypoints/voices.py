"""The voices routes: stock's paths and fields, and ours beside them."""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, File, Form, Query, Request, UploadFile
from fastapi.responses import JSONResponse

from vllm_tts_cache.catalogue.names import fold
from vllm_tts_cache.catalogue.speakers import Page
from vllm_tts_cache.entrypoints import routing, voice_models
from vllm_tts_cache.entrypoints.routing import VOICE_MAX_BYTES, guarded_route
from vllm_tts_cache.entrypoints.service import SpeakerService
from vllm_tts_cache.entrypoints.speech import CachedServingSpeech
from vllm_tts_cache.entrypoints.uploads import Upload
from vllm_tts_cache.entrypoints.voice_models import upload_of_form
from vllm_tts_cache.errors import (
    DeletionPendingError,
    InvalidSpeakerError,
    ServerFaultError,
)
from vllm_tts_cache.store.speaker_store import Found

router = APIRouter(route_class=guarded_route(VOICE_MAX_BYTES))

MAX_PAGE = 1000


def _handler(request: Request) -> CachedServingSpeech:
    handler = getattr(request.app.state, "openai_serving_speech", None)
    if not isinstance(handler, CachedServingSpeech):
        raise routing.NoSpeechModelError
    return handler


Handler = Annotated[CachedServingSpeech, Depends(_handler)]


@router.post("/v1/audio/voices")
async def register_voice(
    handler: Handler,
    upload: Annotated[Upload, Depends(upload_of_form)],
    audio_sample: Annotated[UploadFile | None, File()] = None,
    speaker_embedding: Annotated[str | None, Form()] = None,
    precompute: Annotated[bool, Form()] = True,
) -> Any:
    """Register a voice by a reference clip or by a raw speaker embedding.

    Registering over an existing name replaces it, unless the policy is `immutable`.
    With `precompute` (the default) its encodings are made in the background.
    """
    upload.check_texts()
    handler.check_upload(upload)
    if (audio_sample is None) == (speaker_embedding is None):
        reason = "give either audio_sample or speaker_embedding"
        raise InvalidSpeakerError("audio_sample", reason)
    if audio_sample is not None:
        upload = replace(
            upload,
            mime_type=audio_sample.content_type,
            original_filename=audio_sample.filename,
        )
        upload.check_texts()
        data = await voice_models.read_clip(audio_sample)
        done = await handler.speakers.register_audio(
            upload, data, precompute=precompute
        )
    else:
        embedding = voice_models.parse_embedding(speaker_embedding or "")
        handler.check_embedding(embedding)
        done = await handler.speakers.register_embedding(upload, embedding)
    answer: dict[str, Any] = {
        "success": True,
        "voice": voice_models.voice(done.record),
    }
    if done.warnings:
        answer["warnings"] = voice_models.warnings(done.warnings)
    if handler.note is not None:
        answer["note"] = handler.note
    return answer


@router.get("/v1/audio/voices")
async def list_voices(
    handler: Handler,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    after: str | None = None,
    search: str | None = None,
    names_only: bool = False,
) -> Any:
    """List voices by name: stock's two lists, a page at a time.

    A page holds at most `limit` voices, and about 1 MiB of them. `next` is there if
    more may follow; give it as `after`. Built-in voices come with the first page.
    """
    page = Page(limit=limit, after=after or "", search=search or "")
    answer: dict[str, Any] = {}
    if names_only:
        names = await handler.speakers.names(page)
        num_found = len(names)
    else:
        records = await handler.speakers.records(page)
        num_found = len(records)
        records = voice_models.first_page(records)
        names = [record.name for record in records]
        answer["uploaded_voices"] = [voice_models.voice(record) for record in records]
    builtin = set() if after else handler.builtin_names | {"default"}
    if search:
        builtin = {name for name in builtin if fold(search) in fold(name)}
    answer["voices"] = sorted(builtin.union(names))
    if names and (num_found == limit or len(names) < num_found):
        answer["next"] = names[-1]
    return answer


@router.get("/v1/audio/voices/{name}")
async def get_voice(handler: Handler, name: str) -> Any:
    """Show one voice and the state of its encodings."""
    found = await handler.speakers.get(name)
    status = await _status(handler.speakers, found)
    return {**status, "voice": voice_models.voice(found.record)}


@router.delete("/v1/audio/voices/{name}")
async def delete_voice(handler: Handler, name: str) -> Any:
    """Delete a voice; answers when nothing of it is left anywhere.

    If that takes long the answer is 503, and says how far it is; repeated, it says
    that again, or that it is done.
    """
    try:
        await handler.speakers.deletions.delete(name)
    except DeletionPendingError as exc:
        progress = {"files_removed": exc.files_removed, "waiting_for": exc.waiting_for}
        return routing.json_response(exc, deletion=progress)
    return {"success": True, "message": f"Voice '{name}' deleted successfully"}


@router.post("/v1/audio/voices/{name}/cache")
async def precompute_voice(handler: Handler, name: str, force: bool = False) -> Any:
    """Make the voice's encodings exist and wait for it; one encode for all callers."""
    found = await handler.speakers.get(name)
    answer = {"voice": found.record.name, "cache_status": "ready"}
    try:
        existed = await handler.speakers.precompute(found, force=force)
    except ServerFaultError as exc:
        details = {"voice": found.record.name, "cache_status": "failed"}
        return routing.json_response(exc, **details)
    if existed:
        answer["message"] = "The cache already exists and is valid."
    return answer


@router.get("/v1/audio/voices/{name}/cache")
async def cache_status(handler: Handler, name: str) -> Any:
    """Show whether the voice's encodings exist."""
    return await _status(handler.speakers, await handler.speakers.get(name))


@router.get("/v1/audio/speaker_cache")
async def speaker_cache(handler: Handler) -> Any:
    """Show what is registered and stored and, per worker, counters and sizes."""
    return JSONResponse(await handler.speakers.stats())


async def _status(speakers: SpeakerService, found: Found) -> dict[str, Any]:
    status, error = await speakers.status(found)
    shown = {"voice": found.record.name, "cache_status": status}
    return shown if error is None else {**shown, "error": error}
