"""Finds a request's caller by its headers, and refuses pages of other sites.

A client that reaches a server without a key may use it, and so might any page that its
browser shows: browsers send a form without asking the server first, and by the default
of 0.30 (`--allowed-origins '["*"]'`) pages may read the answers as well.
"""

from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from vllm_tts_cache.entrypoints.serving.host_http import wants_key
from vllm_tts_cache.errors import AdminKeyError, SpeakerRequestError
from vllm_tts_cache.tenants import ALONE, Caller, Tenant, TenantKeys

# Browsers set this header and `origin`, which no page can change; others send neither.
_SITE = "sec-fetch-site"
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


def caller_of(connection: HTTPConnection) -> Caller:
    """Return the caller who sends a request or opens a WebSocket.

    Raises: UnauthorizedError, OtherSiteError.
    """
    handler = getattr(connection.app.state, "openai_serving_speech", None)
    keys = getattr(getattr(handler, "speakers", None), "tenants", None)
    if isinstance(keys, TenantKeys) and keys.is_on:
        return keys.caller(connection.headers.get("authorization"))
    refuse_other_sites(connection)
    return Caller(tenant=ALONE)


def tenant_of(caller: Caller) -> Tenant:
    """Return the tenant whose voices a caller may see. Raises: AdminKeyError."""
    if caller.tenant is None:
        raise AdminKeyError
    return caller.tenant


async def _caller(request: Request) -> Caller:
    return request.state.caller


async def calling_tenant(caller: Annotated[Caller, Depends(_caller)]) -> Tenant:
    """Return the tenant whose voices the caller may see. Raises: AdminKeyError."""
    return tenant_of(caller)


AnyCaller = Annotated[Caller, Depends(_caller)]
CallingTenant = Annotated[Tenant, Depends(calling_tenant)]


class OtherSiteError(SpeakerRequestError, status=403):
    """A page of another site sends a changing request and is not allowed to (403)."""

    text = (
        "A page of another site sent this request, and this server wants no key. "
        "Start it with the page's origin among --allowed-origins, or with a key "
        "(--api-key), which such a page does not know."
    )


def refuse_other_sites(connection: HTTPConnection) -> None:
    """Refuse a changing request of another site's page, unless the host wants a key.

    Reading is left to the host's setting, which browsers enforce.

    Raises: OtherSiteError.
    """
    site, origin = connection.headers.get(_SITE), connection.headers.get("origin")
    is_other = site == "cross-site"
    if site in (None, "same-site") and origin is not None:
        # Browsers do not send the header over plain HTTP, and some do not when they
        # open a WebSocket; all of them send the origin. Another host of the same site
        # (wiki.example.com) may be anybody's.
        is_other = origin.partition("://")[2] != connection.headers.get("host")
    if not is_other or connection.scope.get("method") in _READING:
        return
    if wants_key(connection.app):  # the host has checked the key before
        return
    args = getattr(connection.app.state, "args", None)
    # `*` lets all pages read; it does not let them register, speak and delete.
    allowed = {*(getattr(args, "allowed_origins", None) or ())} - {"*"}
    if origin not in allowed:
        raise OtherSiteError
