"""Routes about clips and whole voices: checked, given back, exported, imported."""

from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

from fastapi import APIRouter, File, Form, Response, UploadFile

from vllm_tts_cache.catalogue.records import check_text
from vllm_tts_cache.entrypoints.http import forms, models
from vllm_tts_cache.entrypoints.http.callers import CallingTenant
from vllm_tts_cache.entrypoints.http.models import FILE_HEADERS
from vllm_tts_cache.entrypoints.http.openapi import (
    HEAD,
    VoiceName,
    answers,
    file_answers,
    head_answers,
    part_answers,
)
from vllm_tts_cache.entrypoints.http.routing import (
    VOICE_MAX_BYTES,
    VoicesRoute,
    guarded_route,
)
from vllm_tts_cache.entrypoints.http.sending import PlacedFile, Wants
from vllm_tts_cache.entrypoints.http.voices import Handler, shown
from vllm_tts_cache.errors import DownloadsOffError
from vllm_tts_cache.store import bundle_format
from vllm_tts_cache.store.bundles import OnConflict
from vllm_tts_cache.tenants import Tenant

_MIB = 1024 * 1024
router = APIRouter(route_class=guarded_route(VOICE_MAX_BYTES))
import_router = APIRouter(
    route_class=guarded_route(bundle_format.MAX_BYTES + _MIB, VoicesRoute)
)

BUNDLE_TYPE = "application/vnd.vllm-tts-cache.bundle+zip"


@router.post("/v1/audio/voices/check", responses=answers(models.Quality, 413, 500))
async def check_clip(
    handler: Handler,
    tenant: CallingTenant,
    audio_sample: Annotated[UploadFile, File(description="the clip")],
    ref_text: Annotated[
        str | None,
        Form(
            description="what is said in it, if that is known",
            examples=["The keeper counts the ships at dusk."],
        ),
    ] = None,
) -> Any:
    """Say what a clip is worth, before anything is registered; nothing is stored."""
    del tenant  # which an administrator is not
    # Before any of it is looked through, as in a registration.
    check_text("ref_text", ref_text)
    data = await forms.read_clip(audio_sample)
    return (await handler.speakers.uploads.check(data, ref_text)).to_dict()


@router.head(
    "/v1/audio/voices/{name}/audio",
    responses=head_answers(404),
    response_class=Response,
    description=HEAD,
)
@router.get(
    "/v1/audio/voices/{name}/audio",
    responses=part_answers(("audio/flac", "audio/wav"), 404),
    response_class=Response,
)
async def get_audio(
    handler: Handler, tenant: CallingTenant, name: VoiceName, wants: Wants
) -> Response:
    """Give the reference audio back: the same samples, as FLAC or WAV."""
    speakers = handler.speakers
    if not speakers.may_download:
        raise DownloadsOffError
    leave = speakers.sounds.enter()
    try:
        found = await speakers.lookups.get(tenant, name)
        data, media_type = await speakers.lookups.audio(found.record)
    except BaseException:
        leave()
        raise
    etag = f"{found.record.audio_sha256}-{len(data):x}"
    return wants.answer(data, leave, media_type, FILE_HEADERS, etag)


@router.get(
    "/v1/audio/voices/{name}/bundle",
    responses=file_answers((BUNDLE_TYPE,), 404),
    response_class=Response,
)
async def export_voice(
    handler: Handler, tenant: CallingTenant, name: VoiceName
) -> Response:
    """Give one file that holds the voice, its consent recording and its encodings."""
    speakers = handler.speakers
    if not speakers.may_download:
        raise DownloadsOffError
    leave = speakers.exports.enter()
    try:
        run = speakers.bundling.run
        record, data = await run(speakers.bundles.export, name, tenant.name)
    except BaseException:
        leave()
        raise
    disposition = f"attachment; filename*=UTF-8''{quote(record.name, safe='')}.voice"
    headers = {**FILE_HEADERS, "Content-Disposition": disposition}
    return PlacedFile(data, leave, BUNDLE_TYPE, headers)


@import_router.post(
    "/v1/audio/voices/import", responses=answers(models.Imported, 409, 413, 507)
)
async def import_voice(
    handler: Handler,
    tenant: CallingTenant,
    bundle: Annotated[UploadFile, File(description="the bundle")],
    name: Annotated[
        str | None,
        Form(
            description="what to call it; the bundle's name without",
            examples=["keeper"],
        ),
    ] = None,
    on_conflict: Annotated[
        Literal["fail", "replace", "rename"],
        Form(description="what to do where the name is taken", examples=["rename"]),
    ] = "fail",
) -> Any:
    """Register the voice of a bundle, whole or not at all.

    Encodings are taken of bundles that this server signed, or one with the same
    `SPEAKER_BUNDLE_KEY`; others are made anew, in the background.
    """
    speakers, file = handler.speakers, bundle.file
    run = speakers.bundling.run
    done = await run(_import, handler, tenant, file, name, on_conflict)
    record = done.done.record
    has_audio = record.audio_sha256 is not None
    await speakers.registered(done.done, precompute=has_audio)
    imported = {
        "voice": shown(speakers, record),
        "encodings_kept": done.num_kept,
        "encodings_left": done.num_left,
    }
    return {"imported": [imported]}


def _import(
    handler: Handler,
    tenant: Tenant,
    file: BinaryIO,
    name: str | None,
    on_conflict: OnConflict,
) -> Any:
    speakers = handler.speakers
    return speakers.bundles.import_voice(
        file.read(bundle_format.MAX_BYTES + 1),  # in the thread, when its turn is come
        check=handler.check_new,
        check_audio=speakers.uploads.check_registrable,
        check_embedding=handler.check_embedding,
        name=name,
        on_conflict=on_conflict,
        tenant=tenant,
    )
