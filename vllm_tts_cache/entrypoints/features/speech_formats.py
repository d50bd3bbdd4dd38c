"""``POST /v1/audio/speech`` in every format, whole and streamed, for OpenAI's clients.

The host streams PCM and WAV only, and knows no AAC. Where a client wants another format
of a stream, the host makes PCM, and FFmpeg encodes it here while it is made. Vapi's
custom voices, which send a text and a rate and play PCM, are answered here as well.
"""

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from http import HTTPStatus
from typing import Any, Literal, NamedTuple

import av
import numpy as np
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field, model_validator

from vllm_tts_cache.config import OUTPUT_RATES_HZ, Settings
from vllm_tts_cache.entrypoints.http import routing
from vllm_tts_cache.entrypoints.http.forms import VoiceName
from vllm_tts_cache.entrypoints.http.limits import MAX_INPUT_CHARS
from vllm_tts_cache.entrypoints.serving import speech_routes

OPUS_RATES_HZ = (8_000, 12_000, 16_000, 24_000, 48_000)
# Without the frame that says how long the file is, which is written at the end.
_NO_LENGTH = {"write_xing": "0", "id3v2_version": "0"}
# A page of 20 ms; by default the first one comes after a second of speech. And with a
# number of the stream that is not random: the same speech is the same file.
_SMALL_PAGES = {"page_duration": "20000", "fflags": "+bitexact"}


class AudioFormat(NamedTuple):
    """A format that can be written without going back to its beginning, as FFmpeg's.

    ``options`` are those of the container.
    """

    container: str
    codec: str
    media_type: str
    bits_per_second: int | None = None  # of the encoder; None for one without loss
    options: dict[str, str] | None = None


FORMATS = {
    "mp3": AudioFormat("mp3", "libmp3lame", "audio/mpeg", 128_000, _NO_LENGTH),
    "opus": AudioFormat("ogg", "libopus", "audio/ogg", 64_000, _SMALL_PAGES),
    "aac": AudioFormat("adts", "aac", "audio/aac", 96_000),
    "flac": AudioFormat("flac", "flac", "audio/flac"),
}


class _Written(list[bytes]):
    """A file that can only be written to, and gives what was written since."""

    def write(self, data: bytes) -> int:
        self.append(bytes(data))
        return len(data)

    def taken(self) -> bytes:
        data = b"".join(self)
        self.clear()
        return data


class SpeechEncoder:
    """Takes PCM of one speech piece by piece, and gives bytes as they are complete.

    Args:
        format_name: One of `FORMATS`.
        sample_rate_hz: Of the PCM, which has one channel of 16-bit integers; for Opus
            one of `OPUS_RATES_HZ`.
    """

    def __init__(self, format_name: str, sample_rate_hz: int):
        wanted = FORMATS[format_name]
        self._rate_hz = sample_rate_hz
        self._lock = threading.Lock()
        self._written = _Written()
        self._container = av.open(
            self._written, "w", format=wanted.container, options=wanted.options
        )
        self._stream: Any = self._container.add_stream(
            wanted.codec, rate=sample_rate_hz, layout="mono"
        )
        if wanted.bits_per_second is not None:
            self._stream.bit_rate = wanted.bits_per_second
        self._num_samples = 0
        self._odd_byte = b""

    def encode(self, pcm: bytes) -> bytes:
        """Return what is complete with these bytes; it may be nothing yet."""
        with self._lock:
            pcm = self._odd_byte + pcm
            num_even = len(pcm) - len(pcm) % 2
            self._odd_byte = pcm[num_even:]
            samples = np.frombuffer(pcm[:num_even], dtype="<i2")[None]
            if samples.size:
                frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
                frame.sample_rate = self._rate_hz
                frame.pts = self._num_samples
                self._num_samples += samples.size
                self._container.mux(self._stream.encode(frame))
            return self._written.taken()

    def end(self) -> bytes:
        """Return the rest."""
        with self._lock:
            if self._num_samples:  # else FFmpeg has begun nothing that it could end
                self._container.mux(self._stream.encode(None))
            self._container.close()
            return self._written.taken()

    def close(self) -> None:
        """Give back FFmpeg's memory, which Python frees late: up to 7 MiB for FLAC."""
        with self._lock:
            self._container.close()


RATE_HEADER = "X-Audio-Sample-Rate"
_Encoding = AbstractAsyncContextManager[SpeechEncoder]
_DELTA, _DONE = "speech.audio.delta", "speech.audio.done"
_OF_THE_BODY = ("content-length", "content-type")
_SAMPLING = ("temperature", "top_p", "top_k")
# What other servers take and no talker here acts on, and the values that ask for
# nothing; the host drops all of them in silence.
_NOT_TAKEN = {"frequency_penalty": 0, "min_p": 0, "presence_penalty": 0}
_NOT_TAKEN["repetition_penalty"] = 1

router = APIRouter(route_class=routing.GuardedRoute)
vapi_router = APIRouter(route_class=routing.GuardedRoute)
speech_routes.router.routes[:] = [  # the route below takes its place
    route
    for route in speech_routes.router.routes
    if getattr(route, "endpoint", None) is not speech_routes.create_speech
]


class SpeechRequest(speech_routes.OpenAICreateSpeechRequest):
    """The host's request, with all formats of OpenAI and with sampling at top level."""

    response_format: Literal["wav", "pcm", "flac", "mp3", "opus", "aac"] = "wav"  # type: ignore[reportIncompatibleVariableOverride]

    @model_validator(mode="wrap")
    @classmethod
    def _from_any_client(cls, given: Any, parse: Callable[[Any], Any]) -> Any:
        if not isinstance(given, dict):
            return parse(given)
        given = dict(given)
        for name, neutral in _NOT_TAKEN.items():
            if given.get(name) not in (None, neutral):
                raise ValueError(f"{name} cannot be set for speech; leave it out")
        sampling = {n: v for n in _SAMPLING if (v := given.get(n)) is not None}
        others = given.get("extra_params")
        if sampling and (others is None or isinstance(others, dict)):
            given["extra_params"] = {**sampling, **(others or {})}
        wanted = given.get("response_format")
        if not isinstance(wanted, str) or wanted not in FORMATS:
            return parse(given)
        request = parse({**given, "response_format": "pcm"})  # which can be streamed
        request.response_format = wanted
        return request


@router.post("/v1/audio/speech", **speech_routes.SPEECH)
async def create_speech(request: SpeechRequest, raw_request: Request) -> Response:
    """As stock, plus headers; a stream answers when its first audio is there.

    Each format can be streamed.
    """
    speech = raw_request.app.state.openai_serving_speech
    adapter = getattr(speech, "cached_adapter", None)
    if adapter is None:
        if _is_encoded(request):
            reason = "response_format: this model streams pcm and wav, and has no aac"
            raise HTTPException(HTTPStatus.BAD_REQUEST, reason)
        return await speech_routes.create_speech(request, raw_request)
    request = _with_defaults(request, speech.speakers.settings)
    name = request.response_format
    rate_hz = request.sample_rate or adapter.tts_cache_family.sample_rate_hz
    if name == "opus" and rate_hz not in OPUS_RATES_HZ:
        rate_hz = OPUS_RATES_HZ[-1]
    changed: dict[str, Any] = {}
    if (is_encoded := _is_encoded(request)) or name == "opus":
        changed["sample_rate"] = rate_hz  # else the host may make its own rate
    if is_encoded:
        changed["response_format"] = "pcm"
    # The host makes no pieces and no events of what a diffusion model speaks.
    is_whole = adapter.tts_cache_family.pipelines and request.is_streaming()
    if is_whole:
        changed |= {"stream": False, "stream_format": None}
    asked = request.model_copy(update=changed) if changed else request
    response: Any = await speech_routes.create_speech(asked, raw_request)
    if response.status_code != HTTPStatus.OK:
        return response
    response.headers[RATE_HEADER] = str(rate_hz)
    if is_encoded:
        response = await _encoded(response, name, rate_hz)
    is_event = request.is_sse_stream() and is_whole
    return _as_event(response, name) if is_event else response


def _is_encoded(request: SpeechRequest) -> bool:
    name = request.response_format
    return name == "aac" or (request.is_streaming() and name in FORMATS)


def _with_defaults(request: SpeechRequest, usual: Settings) -> SpeechRequest:
    """Return a request that says what the operator has set for those that do not."""
    changed: dict[str, Any] = {}
    if request.response_format == "pcm" and request.sample_rate is None:
        changed["sample_rate"] = usual.pcm_sample_rate or None
    says = {"stream", "stream_format"} & request.model_fields_set
    can_stream = request.speed in (None, 1) and not request.word_timestamps
    if usual.stream and can_stream and not says:
        changed["stream_format"] = "audio"
    return request.model_copy(update=changed)


@asynccontextmanager
async def _encoding(name: str, sample_rate_hz: int) -> AsyncIterator[SpeechEncoder]:
    """Give an encoder; its memory is given back however the block is left."""
    # In threads: FFmpeg takes milliseconds, in which the loop serves others.
    encoder = await asyncio.to_thread(SpeechEncoder, name, sample_rate_hz)
    try:
        yield encoder
    finally:  # a thread may be in it still, if this task was cancelled
        asyncio.get_running_loop().run_in_executor(None, encoder.close)


async def _encoded(response: Any, name: str, rate_hz: int) -> Response:
    encoding, media_type = _encoding(name, rate_hz), FORMATS[name].media_type
    if not isinstance(response, StreamingResponse):
        async with encoding as encoder:
            whole = await asyncio.to_thread(encoder.encode, response.body)
            response.body = whole + await asyncio.to_thread(encoder.end)
        response.headers["content-length"] = str(len(response.body))
        response.headers["content-type"] = media_type
    elif response.headers["content-type"].startswith("text/event-stream"):
        response.body_iterator = _encoded_events(response.body_iterator, name, encoding)
    else:
        response.headers["content-type"] = media_type
        response.body_iterator = _encoded_pieces(response.body_iterator, encoding)
    return response


async def _encoded_pieces(pieces: Any, encoding: _Encoding) -> AsyncIterator[bytes]:
    async with aclosing(pieces), encoding as encoder:
        async for piece in pieces:
            if encoded := await asyncio.to_thread(encoder.encode, piece):
                yield encoded
        yield await asyncio.to_thread(encoder.end)


async def _encoded_events(
    events: Any, name: str, encoding: _Encoding
) -> AsyncIterator[str]:
    last: dict[str, Any] = {}
    async with aclosing(events), encoding as encoder:
        async for event in events:
            told = json.loads(event.split("data: ", 1)[1])
            if told["type"] == _DELTA:
                piece = base64.b64decode(told["audio"])
                audio = await asyncio.to_thread(encoder.encode, piece)
                last = {**told, "response_format": name}
                yield _delta(last, audio)
                continue
            if told["type"] == _DONE:
                yield _delta(last, await asyncio.to_thread(encoder.end))
            yield event


def _as_event(whole: Response, name: str) -> Response:
    told = {"type": _DELTA, "response_format": name}
    events = _delta(told, bytes(whole.body)) + _event({"type": _DONE})
    headers = {k: v for k, v in whole.headers.items() if k not in _OF_THE_BODY}
    return Response(events, 200, headers, "text/event-stream", whole.background)


def _delta(told: dict[str, Any], audio: bytes) -> str:
    """Return the event with this audio; nothing without audio."""
    return _event({**told, "audio": base64.b64encode(audio).decode()}) if audio else ""


def _event(told: dict[str, Any]) -> str:
    data = json.dumps(told, separators=(",", ":"))
    return f"event: {told['type']}\ndata: {data}\n\n"


class _Wanted(BaseModel):
    type: Literal["voice-request"]
    text: str = Field(min_length=1, max_length=MAX_INPUT_CHARS)
    sampleRate: Literal[OUTPUT_RATES_HZ]  # type: ignore[reportInvalidTypeForm]


class VapiRequest(BaseModel):
    """What Vapi posts, with much about the call that is left alone."""

    message: _Wanted


_EXAMPLE = {"type": "voice-request", "text": "Hello there.", "sampleRate": 24000}
_SHOWN = {"openapi_extra": speech_routes.example({"message": _EXAMPLE})}


@vapi_router.post("/v1/vapi/{name}", **{**speech_routes.SPEECH, **_SHOWN})
async def speak_for_vapi(
    name: VoiceName, asked: VapiRequest, raw_request: Request
) -> Any:
    """Speak by a voice in 16-bit PCM of one channel, streamed, at the given rate."""
    if raw_request.app.state.openai_serving_speech.cached_adapter is None:
        reason = "sampleRate: this model has a rate of its own, and Vapi wants another"
        raise HTTPException(HTTPStatus.BAD_REQUEST, reason)
    said = SpeechRequest(
        input=asked.message.text,
        voice=name,
        response_format="pcm",
        sample_rate=asked.message.sampleRate,
        stream_format="audio",
    )
    return await create_speech(said, raw_request)
