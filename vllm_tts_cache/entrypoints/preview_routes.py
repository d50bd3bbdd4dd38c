"""Routes that let a voice say something short, and remember how it sounded."""

import asyncio
import time
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Body, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Message
from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest

from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.entrypoints.answer_documents import VoiceName, file_answers
from vllm_tts_cache.entrypoints.callers import CallingTenant
from vllm_tts_cache.entrypoints.executors import RETRY_AFTER_SECONDS
from vllm_tts_cache.entrypoints.previews import default_text
from vllm_tts_cache.entrypoints.routing import CHANGES_MAX_BYTES, guarded_route
from vllm_tts_cache.entrypoints.sending import placed_file
from vllm_tts_cache.entrypoints.speech_routes import create_speech
from vllm_tts_cache.entrypoints.voice_models import FILE_HEADERS
from vllm_tts_cache.entrypoints.voices import Handler
from vllm_tts_cache.errors import PreviewNotFoundError, ServerBusyError

router = APIRouter(route_class=guarded_route(CHANGES_MAX_BYTES))

MAX_TEXT_CHARS = 300
HEADER = "X-Speaker-Preview"
_WAV = "audio/wav"
_TEXT = "This is how I sound."


class PreviewText(BaseModel):
    """What the voice is to say."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = Field(
        default=None,
        max_length=MAX_TEXT_CHARS,
        description="a sentence in the voice's language if it is left out",
        examples=[_TEXT],
    )


@router.post(
    "/v1/audio/voices/{name}/preview",
    responses=file_answers((_WAV,), 404, 413, 500, 507),
    response_class=Response,
)
async def make_preview(
    handler: Handler,
    raw_request: Request,
    tenant: CallingTenant,
    name: VoiceName,
    body: Annotated[PreviewText | None, Body()] = None,
) -> Response:
    """Speak a short text, and keep it: asked again, nothing is spoken.

    It is kept by the clip, its transcript, the model and the text, and goes with the
    voice.
    """
    voice_id = (await handler.speakers.lookups.get(tenant, name)).record.speaker_id
    given = None if body is None or body.text is None else body.text.strip() or None
    failed: list[Response] = []

    async def look() -> SpeakerRecord:
        return (await handler.speakers.lookups.get(tenant, voice_id)).record

    async def speak(record: SpeakerRecord, text: str, seconds: float) -> bytes | None:
        request = OpenAICreateSpeechRequest(
            input=text, voice=record.speaker_id, response_format="wav"
        )
        patience = _Patience(raw_request, seconds)
        answer = await create_speech(request, patience.request)
        if patience.is_over:
            what = f"a preview was not spoken within {seconds:g} s"
            raise ServerBusyError(what, RETRY_AFTER_SECONDS)
        if answer.status_code == 200:
            return bytes(answer.body)
        failed.append(answer)
        return None

    previews, model = handler.speakers.previews, handler.checkpoint_name
    sounds = handler.speakers.sounds
    wav, was_kept = await previews.kept_or_made(look, model, given, speak)
    if wav is None:
        return failed[0]
    # Not before: it may take a minute to be spoken. What was is kept.
    return _wav(wav, sounds.enter(), "kept" if was_kept else "made")


@router.get(
    "/v1/audio/voices/{name}/preview",
    responses=file_answers((_WAV,), 404),
    response_class=Response,
)
async def get_preview(
    handler: Handler,
    tenant: CallingTenant,
    name: VoiceName,
    text: Annotated[
        str | None, Query(description="as it was asked for", examples=[_TEXT])
    ] = None,
) -> Response:
    """Give a preview that was kept; nothing is spoken."""
    speakers = handler.speakers
    leave = speakers.sounds.enter()
    try:
        record = (await speakers.lookups.get(tenant, name)).record
        told = (text or "").strip() or default_text(record.language)
        wav = await speakers.previews.kept(record, handler.checkpoint_name, told)
        if wav is None:
            raise PreviewNotFoundError(name)
    except BaseException:
        leave()
        raise
    return _wav(wav, leave, "kept")


class _Patience:
    """A request whose client has left once so much time is over, if not before.

    The host ends its work, and the engine's, for a client that has left; whoever
    cancels its handler ends neither.
    """

    def __init__(self, request: Request, seconds: float):
        self._receive = request.receive
        self._until = time.monotonic() + seconds
        self.is_over = False
        self.request = Request(request.scope, self._receive_in_time)

    async def _receive_in_time(self) -> Message:
        left = max(0.0, self._until - time.monotonic())
        try:
            return await asyncio.wait_for(self._receive(), left)
        except asyncio.TimeoutError:
            self.is_over = True
            return {"type": "http.disconnect"}


def _wav(data: bytes, leave: Callable[[], None], outcome: str) -> Response:
    return placed_file(data, leave, _WAV, {**FILE_HEADERS, HEADER: outcome})
