"""Lists voices for Open WebUI, which sends no key with its list and wants objects.

Names of voices are their tenant's. So the list has a path of its own for each tenant,
with a token that only who has a key is told, and that gives names and nothing else.
What else Open WebUI asks below that path is answered where a key is asked for.
"""

import hmac
import json
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Request
from fastapi.responses import RedirectResponse
from pydantic import Field

from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.entrypoints.http import models, routing, voices
from vllm_tts_cache.entrypoints.http.models import answers
from vllm_tts_cache.entrypoints.http.routing import CallingTenant
from vllm_tts_cache.entrypoints.speakers.service import SpeakerService
from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.tenants import ALONE, Tenant

_TOKEN = "0123456789abcdef" * 2

router = APIRouter(route_class=routing.GuardedRoute)

Token = Annotated[str, Path(description="of `base_url`", examples=[_TOKEN])]


class BaseURL(models.Answer):
    """What Open WebUI is to be given as its base URL of speech."""

    base_url: str = Field(examples=[f"http://localhost:8091/open-webui/{_TOKEN}"])


class NamedVoices(models.Answer):
    """The first voices by their names; built-in ones as well."""

    voices: list[models.NamedVoice]


@router.get("/v1/open_webui", responses=answers(BaseURL))
async def show_open_webui(
    handler: voices.Handler, tenant: CallingTenant, request: Request
) -> Any:
    """Show the base URL for Open WebUI, below which a list of names needs no key.

    It changes with the secret of the catalogue.
    """
    secret = await handler.speakers.texts.run(handler.speakers.store.database.secret)
    return {"base_url": f"{request.base_url}open-webui/{_token(secret, tenant)}"}


# Without a key, so not guarded: the token is one.
names_router = APIRouter()


@names_router.get(
    "/open-webui/{token}/audio/voices", responses=answers(NamedVoices, 404)
)
async def list_for_open_webui(handler: voices.Handler, token: Token) -> Any:
    """List the names of a tenant's voices, at most 1,000."""
    run = handler.speakers.texts.run
    try:
        if (tenant := await run(_tenant_of, handler.speakers, token)) is None:
            reason = "no such path: GET /v1/open_webui, with a key, shows yours"
            raise HTTPException(HTTPStatus.NOT_FOUND, reason)
        page = Page(limit=voices.MAX_PAGE, tenant=tenant.name)
        listed = await voices.list_voices(handler, page, names_only=True)
    except TTSCacheError as exc:  # whose text may name a path, and nobody gave a key
        raise HTTPException(exc.http_status, "the voices cannot be read now") from exc
    return {"voices": json.loads(bytes(listed.body))["data"]}


router.include_router(names_router)


@router.post("/open-webui/{token}/audio/speech", include_in_schema=False)
@router.get("/open-webui/{token}/models", include_in_schema=False)
async def redirect_open_webui(request: Request, token: Token) -> Any:
    """Send on what comes with a key; 307 keeps method, body and headers."""
    path = request.url.path.partition(token)[2]
    root = request.scope.get("root_path", "")
    return RedirectResponse(f"{root}/v1{path}", HTTPStatus.TEMPORARY_REDIRECT)


def _tenant_of(speakers: SpeakerService, token: str) -> Tenant | None:
    keys, secret = speakers.tenants, speakers.store.database.secret()
    tenants = keys.tenants.values() if keys.is_on else [ALONE]
    is_it = partial(hmac.compare_digest, token.encode())
    return next((t for t in tenants if is_it(_token(secret, t).encode())), None)


def _token(secret: bytes, tenant: Tenant) -> str:
    named = f"names of {tenant.name}".encode()
    return hmac.new(secret, named, "sha256").hexdigest()[:32]
