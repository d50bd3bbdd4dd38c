"""``/health``: well only where voices can be cloned as well."""

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from vllm_tts_cache.entrypoints.speech import CachedServingSpeech

router = APIRouter()


@router.get("/health", include_in_schema=False)
async def health(raw_request: Request) -> Any:
    """As the host's; 503 with a reason until the workers' encoders are known.

    Also where they never will be, as they have another store than this process has: no
    traffic is for a server like that.
    """
    from vllm_omni.entrypoints.openai import api_server

    answer = await api_server.health(raw_request)
    handler = getattr(raw_request.app.state, "openai_serving_speech", None)
    if answer.status_code != HTTPStatus.OK or not _lacks_encoders(handler):
        return answer
    reason = "the workers have not said yet how they encode voices; see the log"
    content = {"status": "unhealthy", "reason": reason}
    return JSONResponse(content, HTTPStatus.SERVICE_UNAVAILABLE)


def _lacks_encoders(handler: object) -> bool:
    return (
        isinstance(handler, CachedServingSpeech)
        and not handler.speakers.encodings.knows_encoders
    )
