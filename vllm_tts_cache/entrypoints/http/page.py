"""The page at `/voices`: files of this package, served from memory."""

from collections.abc import Mapping
from hashlib import sha256
from importlib import resources
from pathlib import PurePosixPath
from typing import NamedTuple

from fastapi import APIRouter, HTTPException, Request, Response

PAGE = "/voices"
ASSETS = f"{PAGE}/assets"
_INDEX = "index.html"

# The machine's own table of types may have a script as plain text, and a browser that
# may not guess (`nosniff`) would not run it.
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Clients choose the names and texts of voices: even a text that became markup could
# neither run nor send anything.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src 'self' blob:; connect-src 'self'; form-action 'none'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(self)",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # A browser checks each file that it has kept by its ETag, also after an upgrade.
    "Cache-Control": "no-cache",
}


class Asset(NamedTuple):
    """A file of the page, and the name of its bytes as HTTP quotes it."""

    body: bytes
    media_type: str
    etag: str


def read_assets() -> Mapping[str, Asset]:
    """Read the files of the page by their names."""
    assets: dict[str, Asset] = {}
    for file in (resources.files("vllm_tts_cache.entrypoints") / "web").iterdir():
        if media_type := _MEDIA_TYPES.get(PurePosixPath(file.name).suffix):
            body = file.read_bytes()
            etag = f'"{sha256(body).hexdigest()[:32]}"'
            assets[file.name] = Asset(body, media_type, etag)
    return assets


def page_router(assets: Mapping[str, Asset]) -> APIRouter:
    """Return the routes that answer with these files alone."""
    router = APIRouter(include_in_schema=False)

    @router.api_route(PAGE, methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return _answer(request, assets[_INDEX])

    @router.api_route(ASSETS + "/{name}", methods=["GET", "HEAD"])
    async def asset(request: Request, name: str) -> Response:
        if name not in assets:
            raise HTTPException(404, "Not Found")
        return _answer(request, assets[name])

    return router


def _answer(request: Request, asset: Asset) -> Response:
    headers = _HEADERS | {"ETag": asset.etag}
    known = request.headers.get("if-none-match", "").split(",")
    # A proxy that packs an answer marks its tag as weak.
    if asset.etag in {tag.strip().removeprefix("W/") for tag in known}:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)
