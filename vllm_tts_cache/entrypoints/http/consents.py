"""The routes of consent recordings, as OpenAI's client calls them."""

from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Path, Query, UploadFile
from pydantic import BaseModel, Field

from vllm_tts_cache.entrypoints.http import forms, models
from vllm_tts_cache.entrypoints.http.models import CONSENT_ID, answers
from vllm_tts_cache.entrypoints.http.routing import CallingTenant, GuardedRoute
from vllm_tts_cache.entrypoints.http.voices import Handler

router = APIRouter(route_class=GuardedRoute)

MAX_PAGE = 100
ConsentId = Annotated[str, Path(description="its id", examples=[CONSENT_ID])]


class ConsentChanges(BaseModel):
    """What may be changed of a recording."""

    name: str = Field(examples=["Ann's consent"])


@router.post(
    "/v1/audio/voice_consents", responses=answers(models.Consent, 409, 413, 507)
)
async def create_consent(
    handler: Handler,
    tenant: CallingTenant,
    name: Annotated[
        str, Form(description="a label for people", examples=["Ann's consent"])
    ],
    language: Annotated[str, Form(description="BCP 47 tag", examples=["en-US"])],
    recording: Annotated[UploadFile, File(description="the clip")],
) -> Any:
    """Keep a recording in which a person consents to being cloned."""
    data = await forms.read_clip(recording)
    uploads = handler.speakers.uploads
    kept = await uploads.keep_consent(tenant, name, language, data)
    return models.consent(kept)


@router.get("/v1/audio/voice_consents", responses=answers(models.ConsentList))
async def list_consents(
    handler: Handler,
    tenant: CallingTenant,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, examples=[20])] = 20,
    after: Annotated[
        str, Query(description="`last_id` of the last page", examples=[CONSENT_ID])
    ] = "",
) -> Any:
    """List recordings, newest first."""
    speakers = handler.speakers
    on_page = speakers.store.consents.on_page
    found = await speakers.lookups.reads.run(on_page, limit + 1, after, tenant.name)
    data = [models.consent(record) for record in found[:limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > limit,
    }


@router.get(
    "/v1/audio/voice_consents/{consent_id}", responses=answers(models.Consent, 404)
)
async def get_consent(
    handler: Handler, tenant: CallingTenant, consent_id: ConsentId
) -> Any:
    """Show one recording."""
    run, get = handler.speakers.lookups.reads.run, handler.speakers.store.consents.get
    found = await run(get, consent_id, tenant.name)
    return models.consent(found)


@router.post(
    "/v1/audio/voice_consents/{consent_id}", responses=answers(models.Consent, 404, 413)
)
async def change_consent(
    handler: Handler,
    tenant: CallingTenant,
    consent_id: ConsentId,
    changes: ConsentChanges,
) -> Any:
    """Change a recording's label."""
    speakers = handler.speakers
    rename, run = speakers.store.consents.rename, speakers.uploads.changes.run
    changed = await run(rename, consent_id, changes.name, tenant.name)
    return models.consent(changed)


@router.delete(
    "/v1/audio/voice_consents/{consent_id}",
    responses=answers(models.ConsentDeleted, 404, 409),
)
async def delete_consent(
    handler: Handler, tenant: CallingTenant, consent_id: ConsentId
) -> Any:
    """Delete a recording that no voice stands on; else 409 says which do."""
    await handler.speakers.deletions.delete_consent(consent_id, tenant.name)
    return {"id": consent_id, "object": "audio.voice_consent", "deleted": True}
