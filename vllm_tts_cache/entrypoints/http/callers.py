"""Who calls, by the first byte of a request.

And pages of other sites: what a browser sends for them changes nothing here. Whoever
can reach a server without a key may use it, and so may any page that such a person
looks at: its script's form is sent without asking the server first, and by the host's
default (`--allowed-origins '["*"]'`) pages may read the answers as well.
"""

from http import HTTPStatus
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Request
from starlette.requests import HTTPConnection

from vllm_tts_cache.entrypoints.serving.host_http import wants_key
from vllm_tts_cache.errors import AdminKeyError, SpeakerRequestError
from vllm_tts_cache.tenants import ALONE, Caller, Tenant, TenantKeys

# A browser sets it, and no page can change it; other clients do not send it.
_SITE = "sec-fetch-site"
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class KnowsTenants:
    """What serves speech, and knows whose keys are whose."""

    @property
    def tenants(self) -> TenantKeys:
        """The keys."""
        raise NotImplementedError


def caller_of(connection: HTTPConnection) -> Caller:
    """Return who sent a request, or opened a WebSocket; before anything of it is read.

    Raises: UnauthorizedError, OtherSiteError.
    """
    handler = getattr(connection.app.state, "openai_serving_speech", None)
    if isinstance(handler, KnowsTenants) and handler.tenants.is_on:
        return handler.tenants.caller(connection.headers.get("authorization"))
    refuse_other_sites(connection)
    return Caller(tenant=ALONE)


def caller_found(request: Request) -> Caller:
    """Return who it was found to be; a route that did not look has nobody."""
    return request.state.caller


async def _caller(request: Request) -> Caller:
    return caller_found(request)


async def _tenant(caller: Annotated[Caller, Depends(_caller)]) -> Tenant:
    """Raises: AdminKeyError."""
    return tenant_of(caller)


def tenant_of(caller: Caller) -> Tenant:
    """Return whose voices a caller may see.

    Raises: AdminKeyError.
    """
    if caller.tenant is None:
        raise AdminKeyError
    return caller.tenant


AnyCaller = Annotated[Caller, Depends(_caller)]
CallingTenant = Annotated[Tenant, Depends(_tenant)]


class OtherSiteError(SpeakerRequestError):
    """A page of another site wants something done, and nothing says that it may."""

    http_status = HTTPStatus.FORBIDDEN

    def __init__(self) -> None:
        super().__init__(
            "A page of another site sent this request, and this server wants no key. "
            "Start it with the page's origin among --allowed-origins, or with a key "
            "(--api-key), which such a page does not know."
        )


def refuse_other_sites(connection: HTTPConnection) -> None:
    """Refuse what a page of another site would do, unless the host wants a key for it.

    Reading is left to the host's setting, which browsers keep.

    Args:
        connection: A request, or the opening of a WebSocket, that has shown no key.

    Raises: OtherSiteError.
    """
    if not _is_other_site(connection) or _only_reads(connection):
        return
    if wants_key(connection.app):  # and was shown it, or this would not be reached
        return
    # That all may read (`*`) does not say that all may register, speak and delete.
    if connection.headers.get("origin") not in _allowed_origins(connection.app):
        raise OtherSiteError


def _is_other_site(connection: HTTPConnection) -> bool:
    site = connection.headers.get(_SITE)
    if site is not None or connection.scope["type"] != "websocket":
        return site == "cross-site"
    # Not every browser says it when it opens a WebSocket; whose page it is, each does.
    origin = connection.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != connection.headers["host"]


def _only_reads(connection: HTTPConnection) -> bool:
    return connection.scope.get("method") in _READING


def _allowed_origins(app: FastAPI) -> frozenset[str]:
    args = getattr(app.state, "args", None)
    return frozenset(getattr(args, "allowed_origins", None) or ()) - {"*"}
