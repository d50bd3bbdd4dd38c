"""Speaks for Vapi's custom voices, which send a text and a rate and play PCM."""

from http import HTTPStatus
from typing import Any, Literal

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, Field

from vllm_tts_cache.config import OUTPUT_RATES_HZ
from vllm_tts_cache.entrypoints.features import speech_formats
from vllm_tts_cache.entrypoints.http import routing
from vllm_tts_cache.entrypoints.http.limits import MAX_INPUT_CHARS
from vllm_tts_cache.entrypoints.http.openapi import VoiceName
from vllm_tts_cache.entrypoints.serving import speech_routes

router = APIRouter(route_class=routing.GuardedRoute)


class _Wanted(BaseModel):
    type: Literal["voice-request"]
    text: str = Field(min_length=1, max_length=MAX_INPUT_CHARS)
    sampleRate: Literal[OUTPUT_RATES_HZ]  # type: ignore[reportInvalidTypeForm]


class VapiRequest(BaseModel):
    """What Vapi posts, with much about the call that is left alone."""

    message: _Wanted


_EXAMPLE = {"type": "voice-request", "text": "Hello there.", "sampleRate": 24000}
_SPEECH: dict[str, Any] = {
    **speech_routes.SPEECH,
    "openapi_extra": speech_routes.example({"message": _EXAMPLE}),
}


@router.post("/v1/vapi/{name}", **_SPEECH)
async def speak_for_vapi(
    name: VoiceName, asked: VapiRequest, raw_request: Request
) -> Any:
    """Speak by a voice in 16-bit PCM of one channel, streamed, at the given rate."""
    if raw_request.app.state.openai_serving_speech.cached_adapter is None:
        reason = "sampleRate: this model has a rate of its own, and Vapi wants another"
        raise HTTPException(HTTPStatus.BAD_REQUEST, reason)
    said = speech_formats.SpeechRequest(
        input=asked.message.text,
        voice=name,
        response_format="pcm",
        sample_rate=asked.message.sampleRate,
        stream_format="audio",
    )
    return await speech_formats.create_speech(said, raw_request)
