"""The batch route, which the host answers outside its serving class."""

from fastapi import APIRouter, Depends, Request, Response
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm_omni.entrypoints.openai import api_server
from vllm_omni.entrypoints.openai.protocol.audio import BatchSpeechRequest

from vllm_tts_cache.entrypoints.request_speaker import HEADER, observe_outcomes

router = APIRouter()


@router.post("/v1/audio/speech/batch", dependencies=[Depends(validate_json_request)])
async def create_speech_batch(
    request: BatchSpeechRequest, raw_request: Request
) -> Response:
    """As stock, plus the header: `miss` if any item's voice had to be encoded."""
    with observe_outcomes() as outcomes:
        response = await api_server.create_speech_batch(request, raw_request)
    response.headers[HEADER] = outcomes.header()
    return response
