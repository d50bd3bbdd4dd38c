"""A route whose errors are answered in the host's JSON shape, without stack traces."""

import logging
from collections.abc import Callable, Coroutine
from tempfile import gettempdir
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from vllm_tts_cache.entrypoints import http_errors
from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.files import storage_error

logger = logging.getLogger("vllm.vllm_tts_cache")


class GuardedRoute(APIRoute):
    """Maps our errors here: the host's application owns its exception handlers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler that FastAPI made."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await handle(request)
            except TTSCacheError as exc:
                return _answer(request, exc)
            except HTTPException as exc:
                # Large uploads are spooled to disk while they are received, and
                # FastAPI takes a disk that is full for a body that is wrong.
                if not isinstance(exc.__cause__, OSError):
                    raise
                return _answer(request, storage_error(gettempdir(), exc.__cause__))

        return guarded


def _answer(request: Request, error: TTSCacheError) -> Response:
    if http_errors.is_server_fault(http_errors.status_of(error)):
        logger.warning("%s %s: %s", request.method, request.url.path, error)
    return http_errors.json_response(error)
