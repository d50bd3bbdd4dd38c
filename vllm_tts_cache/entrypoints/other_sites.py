"""Pages of other sites: what a browser sends for them changes nothing here.

Whoever can reach a server without a key may use it, and so may any page that such a
person looks at: its script's form is sent without asking the server first, and by the
host's default (`--allowed-origins '["*"]'`) pages may read the answers as well.
"""

from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.requests import HTTPConnection
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_tts_cache.errors import SpeakerRequestError

# A browser sets it, and no page can change it; other clients do not send it.
_SITE = "sec-fetch-site"
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class OtherSiteError(SpeakerRequestError):
    """A page of another site wants something done, and nothing says that it may."""

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
    if _wants_key(connection.app):  # and was shown it, or this would not be reached
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


def _wants_key(app: FastAPI) -> bool:
    return any(each.cls is AuthenticationMiddleware for each in app.user_middleware)


def _allowed_origins(app: FastAPI) -> frozenset[str]:
    args = getattr(app.state, "args", None)
    return frozenset(getattr(args, "allowed_origins", None) or ()) - {"*"}
