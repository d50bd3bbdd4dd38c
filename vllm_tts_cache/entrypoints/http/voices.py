"""The voices routes: stock's paths and fields, and our own."""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, File, Form, Query, Request, UploadFile
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator

from vllm_tts_cache import errors
from vllm_tts_cache.catalogue import pages
from vllm_tts_cache.catalogue.names import PLACEHOLDER, fold
from vllm_tts_cache.catalogue.pages import Page, Sort, cursor
from vllm_tts_cache.catalogue.records import SpeakerRecord
from vllm_tts_cache.entrypoints.http import forms, models, routing
from vllm_tts_cache.entrypoints.http.forms import VoiceChanges, VoiceName
from vllm_tts_cache.entrypoints.http.models import answers
from vllm_tts_cache.entrypoints.http.routing import AnyCaller, CallingTenant
from vllm_tts_cache.entrypoints.serving.host_http import unless_client_leaves
from vllm_tts_cache.entrypoints.serving.serving import CachedServingSpeech
from vllm_tts_cache.entrypoints.speakers.registering import Upload
from vllm_tts_cache.entrypoints.speakers.service import SpeakerService
from vllm_tts_cache.store.speaker_store import StoredSpeaker

router = APIRouter(route_class=routing.GuardedRoute)

MAX_PAGE = 1000


async def _handler(request: Request) -> CachedServingSpeech:
    handler = getattr(request.app.state, "openai_serving_speech", None)
    if not isinstance(handler, CachedServingSpeech):
        raise routing.NoSpeechModelError
    return handler


Handler = Annotated[CachedServingSpeech, Depends(_handler)]
Search = Annotated[
    str | None,
    Query(
        description="in names, aliases, descriptions and labels' values",
        examples=["keep"],
    ),
]
Labels = Annotated[
    list[str] | None,
    Query(
        description="`key:value`; may be repeated, and all must fit",
        examples=[["team:news"]],
    ),
]
Flag = Annotated[bool, Query(examples=[True])]

_STILL_MADE: dict[str, Any] = {
    "model": models.CacheStatus,
    "description": "with `urgent=false`: they are still being made; ask again",
}


def shown(
    speakers: SpeakerService, record: SpeakerRecord, *, is_lost: bool = False
) -> dict[str, Any]:
    """Return a voice as JSON, as all routes show it.

    With tenants no generation is shown: it tells how much other tenants register.
    """
    is_numbered = not speakers.tenants.is_on
    return models.voice(record, is_numbered=is_numbered, is_lost=is_lost)


@router.post("/v1/audio/voices", responses=answers(models.Registered, 409, 413, 507))
async def register_voice(
    handler: Handler,
    tenant: CallingTenant,
    request: Request,
    upload: Annotated[Upload, Depends(forms.upload_of_form)],
    audio_sample: Annotated[
        list[UploadFile] | None,
        BeforeValidator(forms.without_empty),
        File(description="the clip; repeated, several clips of one voice"),
    ] = None,
    ref_text: Annotated[
        list[str] | None,
        Form(
            description="what is said in it; for several, a line or a field for each",
            examples=[["The keeper counts the ships at dusk."]],
        ),
    ] = None,
    speaker_embedding: Annotated[
        str | None,
        Form(
            description="instead of a clip: a JSON list of the model's dimension",
            examples=["[0.12, -0.53, 0.08]"],
        ),
    ] = None,
    precompute: Annotated[
        bool, Form(description="encode it in the background", examples=[True])
    ] = True,
    check: Annotated[
        bool, Form(description="say what the clip is worth: `quality`", examples=[True])
    ] = True,
) -> Any:
    """Register a voice by reference clips or by a raw speaker embedding.

    Most models take one clip; several are a 400 on those.
    Registering over an existing name replaces it, unless the policy is `immutable`.
    With `precompute` (the default) its encodings are made in the background.
    """
    speakers, clips = handler.speakers, audio_sample or []
    speakers.uploads.check_number(len(clips))
    transcript = forms.transcript_of(ref_text or [], max(1, len(clips)))
    upload = replace(upload, ref_text=transcript, precompute=precompute)
    upload.check_texts()
    handler.check_new(upload.name, upload.ref_text, upload.extras)
    if (not clips) == (speaker_embedding is None):
        reason = "give either audio_sample or speaker_embedding"
        raise errors.InvalidSpeakerError("audio_sample", reason)
    if clips:
        mime_type, filename = clips[0].content_type, clips[0].filename
        upload = replace(upload, mime_type=mime_type, original_filename=filename)
        files = await forms.read_clips(clips)
        new = await speakers.uploads.register_audio(tenant, upload, *files, check=check)
    else:
        embedding = forms.parse_embedding(speaker_embedding or "")
        handler.check_embedding(embedding)
        new = await speakers.uploads.register_embedding(tenant, upload, embedding)
    speakers.registered(new.done, precompute=precompute)
    record = new.done.record
    answer: dict[str, Any] = {
        "success": True,
        "voice": shown(speakers, record),
        **models.openai_voice(record),
    }
    if new.quality is not None:
        answer["quality"] = new.quality.to_dict()
    warnings = [*new.warnings, *forms.of_unknown(await request.form(), request)]
    if warnings:
        answer["warnings"] = [
            {"code": str(each.code), "message": each.message} for each in warnings
        ]
    if handler.note is not None:
        answer["note"] = handler.note
    return answer


async def _page(
    tenant: CallingTenant,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, examples=[100])] = MAX_PAGE,
    after: Annotated[
        str | None,
        Query(
            description="`next` of the last page, a name, or an id", examples=["keeper"]
        ),
    ] = None,
    search: Search = None,
    label: Labels = None,
    sort: Annotated[Sort, Query(examples=["name"])] = "name",
) -> Page:
    return Page(
        limit=limit,
        after=after or "",
        search=search or "",
        labels=forms.parse_label_filters(label or []),
        sort=sort,
        tenant=tenant.name,
    )


@router.get("/v1/audio/voices", responses=answers(models.VoiceList))
async def list_voices(
    handler: Handler, page: Annotated[Page, Depends(_page)], names_only: Flag = False
) -> Any:
    """List voices: stock's two lists, a page at a time.

    A page holds at most `limit` voices, and about 1 MiB of them. `next` is there if
    more may follow; give it as `after`. Built-in voices come with the first page.
    """
    store, reads = handler.speakers.store, handler.speakers.lookups.reads
    answer: dict[str, Any] = {}
    if names_only and page.sort == "name":
        names = await reads.run(store.names, page)
        num_found, last = len(names), names[-1:]
    else:
        records = await reads.run(store.records, page)
        num_found = len(records)
        if num_found > 1 and not pages.fit(records):
            del records[-1]
        last = [cursor(record, page.sort) for record in records[-1:]]
        names = [record.name for record in records]
        if not names_only:
            voices = [shown(handler.speakers, record) for record in records]
            answer["uploaded_voices"] = voices
            answer["max_clips"] = handler.speakers.model.max_clips
    answer["voices"] = sorted({*_builtin(handler, page), *names})
    answer["object"] = "list"
    answer["data"] = [
        {"id": name, "name": name, "object": "audio.voice"} for name in answer["voices"]
    ]
    if last and (num_found == page.limit or len(names) < num_found):
        answer["next"] = last[0]
    # Not the plain dict: FastAPI would go through a thousand voices once more.
    return JSONResponse(answer)


def _builtin(handler: CachedServingSpeech, page: Page) -> set[str]:
    """Return the checkpoint's own voices that belong on the page."""
    if page.after or page.labels:
        return set()
    builtin = handler.builtin_names
    # Else a request with the placeholder is refused.
    if not handler.needs_voice or handler.speakers.default_voice(page.tenant):
        builtin |= {PLACEHOLDER}
    return {name for name in builtin if fold(page.search) in fold(name)}


@router.get("/v1/audio/voices/{name}", responses=answers(models.VoiceStatus, 404))
async def get_voice(handler: Handler, tenant: CallingTenant, name: VoiceName) -> Any:
    """Show one voice, named or by its id, and the state of its encodings."""
    found = await handler.speakers.lookups.get(tenant, name)
    return await _shown(handler.speakers, found)


@router.patch(
    "/v1/audio/voices/{name}", responses=answers(models.VoiceStatus, 404, 409, 413)
)
async def change_voice(
    handler: Handler, tenant: CallingTenant, name: VoiceName, changes: VoiceChanges
) -> Any:
    """Change a voice's name, texts, labels or expiry; its audio and its id stay.

    A field that the body leaves out stays, null removes it. The transcript decides in
    which ways the voice can be cloned: `modes` lists them.
    """
    parsed = changes.parsed()
    handler.check_fields(parsed.given)
    changed = await handler.speakers.change(tenant, name, parsed)
    found = await handler.speakers.lookups.get(tenant, changed.speaker_id)
    return await _shown(handler.speakers, found)


@router.delete("/v1/audio/voices/{name}", responses=answers(models.VoiceDeleted, 404))
async def delete_voice(
    handler: Handler,
    tenant: CallingTenant,
    name: VoiceName,
    key: forms.RepeatedKey = None,
) -> Any:
    """Delete a voice; answers when it is deleted everywhere.

    If that takes long the answer is 503 with the progress, and the deletion goes on;
    the same request again waits for it.
    """
    deleted_id = await handler.speakers.deletions.delete(name, tenant.name, key)
    return {
        "success": True,
        "message": f"Voice '{name}' deleted successfully",
        "id": deleted_id or name,
        "object": "audio.voice.deleted",
        "deleted": True,
    }


@router.post(
    "/v1/audio/voices/{name}/cache",
    responses={**answers(models.CacheStatus, 404), 202: _STILL_MADE},
)
async def precompute_voice(
    raw_request: Request,
    handler: Handler,
    tenant: CallingTenant,
    name: VoiceName,
    force: Flag = False,
    urgent: Flag = True,
) -> Any:
    """Make the voice's encodings exist and wait for it; one encode for all callers.

    With `urgent=false` they are made in the background, in turn with others, and slow
    running streams less. After 10 s the answer is 202: ask again.
    """
    found = await handler.speakers.lookups.get(tenant, name)
    answer = {"voice": found.record.name, "cache_status": "ready"}
    try:
        work = handler.speakers.encodings.precompute(found, force=force, urgent=urgent)
        existed = await unless_client_leaves(raw_request, work)
    except errors.ServerFaultError as exc:
        name = found.record.name
        return routing.json_response(exc, voice=name, cache_status="failed")
    if existed is None:
        return JSONResponse({**answer, "cache_status": "processing"}, 202)
    if existed:
        answer["message"] = "The cache already exists and is valid."
    return answer


@router.get("/v1/audio/voices/{name}/cache", responses=answers(models.CacheStatus, 404))
async def cache_status(handler: Handler, tenant: CallingTenant, name: VoiceName) -> Any:
    """Show whether the voice's encodings exist."""
    found = await handler.speakers.lookups.get(tenant, name)
    return await _status(handler.speakers, found)


@router.get("/v1/audio/speaker_cache", responses=answers(models.SpeakerCache))
async def speaker_cache(handler: Handler, caller: AnyCaller) -> Any:
    """Show what is registered and stored and, per worker, counters and sizes.

    Where the server has tenants, that is for an administrator's key; a tenant's shows
    what the tenant has.
    """
    return JSONResponse(await handler.speakers.stats(caller))


async def _shown(speakers: SpeakerService, found: StoredSpeaker) -> dict[str, Any]:
    is_lost = await speakers.lookups.reads.run(speakers.store.is_lost, found.record)
    return {
        **await _status(speakers, found),
        "voice": shown(speakers, found.record, is_lost=is_lost),
        "modes": speakers.model.modes(found.record),
    }


async def _status(speakers: SpeakerService, found: StoredSpeaker) -> dict[str, Any]:
    status = await speakers.encodings.status(found)
    answer: dict[str, Any] = {"voice": found.record.name, "cache_status": status.state}
    if status.error is not None:
        answer["error"] = status.error
    if status.next_try is not None:
        answer["attempts"] = status.num_attempts
        answer["next_try_at"] = round(status.next_try)
    return answer
