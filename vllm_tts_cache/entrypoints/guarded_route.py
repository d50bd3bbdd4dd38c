"""A route whose errors are answered in the host's JSON shape, without stack traces."""

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from vllm_tts_cache.entrypoints import http_errors
from vllm_tts_cache.errors import TTSCacheError

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
                if http_errors.is_server_fault(http_errors.status_of(exc)):
                    logger.warning("%s %s: %s", request.method, request.url.path, exc)
                return http_errors.json_response(exc)

        return guarded
