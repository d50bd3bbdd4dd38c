"""Who calls, by the headers of a request; pages of other sites are refused.

A client that reaches a server without a key may use it, and so might any page that its
browser shows: a form is sent without asking the server first, and by the host's default
(`--allowed-origins '["*"]'`) pages may read the answers as well.
"""

from http import HTTPStatus
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from vllm_tts_cache.entrypoints.serving.host_http import wants_key
from vllm_tts_cache.errors import AdminKeyError, SpeakerRequestError
from vllm_tts_cache.tenants import ALONE, Caller, Tenant, TenantKeys

# A browser sets it, and no page can change it; other clients do not send it.
_SITE = "sec-fetch-site"
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


def caller_of(connection: HTTPConnection) -> Caller:
    """Return who sends a request, or opens a WebSocket, by its headers.

    Raises: UnauthorizedError, OtherSiteError.
    """
    handler = getattr(connection.app.state, "openai_serving_speech", None)
    keys = getattr(handler, "tenants", None)
    if isinstance(keys, TenantKeys) and keys.is_on:
        return keys.caller(connection.headers.get("authorization"))
    refuse_other_sites(connection)
    return Caller(tenant=ALONE)


def tenant_of(caller: Caller) -> Tenant:
    """Return whose voices a caller may see. Raises: AdminKeyError."""
    if caller.tenant is None:
        raise AdminKeyError
    return caller.tenant


async def _caller(request: Request) -> Caller:
    return request.state.caller


async def calling_tenant(caller: Annotated[Caller, Depends(_caller)]) -> Tenant:
    """Return whose voices the caller may see. Raises: AdminKeyError."""
    return tenant_of(caller)


AnyCaller = Annotated[Caller, Depends(_caller)]
CallingTenant = Annotated[Tenant, Depends(calling_tenant)]


class OtherSiteError(SpeakerRequestError):
    """A page of another site sends what changes something, and is not allowed to."""

    http_status = HTTPStatus.FORBIDDEN

    def __init__(self) -> None:
        super().__init__(
            "A page of another site sent this request, and this server wants no key. "
            "Start it with the page's origin among --allowed-origins, or with a key "
            "(--api-key), which such a page does not know."
        )


def refuse_other_sites(connection: HTTPConnection) -> None:
    """Refuse what a page of another site would change, unless the host wants a key.

    Reading is left to the host's setting, which browsers keep. Raises: OtherSiteError.
    """
    site, origin = connection.headers.get(_SITE), connection.headers.get("origin")
    is_other = site == "cross-site"
    if site is None and origin is not None and connection.scope["type"] == "websocket":
        # Not every browser says it when it opens a WebSocket; whose page it is, each
        # does.
        is_other = urlsplit(origin).netloc != connection.headers["host"]
    if not is_other or connection.scope.get("method") in _READING:
        return
    if wants_key(connection.app):  # and was shown it, or this would not be reached
        return
    args = getattr(connection.app.state, "args", None)
    # That all may read (`*`) does not say that all may register, speak and delete.
    allowed = {*(getattr(args, "allowed_origins", None) or ())} - {"*"}
    if origin not in allowed:
        raise OtherSiteError
