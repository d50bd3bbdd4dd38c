"""Registrations that are asked for, and why some of them are refused."""

from collections.abc import Awaitable

from fastapi import Response

from vllm_tts_cache.entrypoints.metrics.series import process_metrics
from vllm_tts_cache.entrypoints.routing import GuardedRoute

_REGISTERING = ("/v1/audio/voices", "/v1/audio/voices/import")


class VoicesRoute(GuardedRoute):
    """Counts registrations, whatever it is that refuses them."""

    async def counted(self, handled: Awaitable[Response]) -> Response:
        """Count what is asked of the route, if that is to register a voice."""
        if self.path not in _REGISTERING or "POST" not in self.methods:
            return await handled
        metrics = process_metrics()
        metrics.uploads.inc()
        try:
            return await handled
        except Exception as exc:
            metrics.refuse_upload(exc)
            raise
