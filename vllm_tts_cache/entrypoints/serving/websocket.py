"""The host's speech WebSocket: the work for a client ends when it leaves."""

import asyncio
from contextlib import suppress
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect
from pydantic import ValidationError
from starlette.types import Message
from vllm_omni.entrypoints.openai.protocol.audio import StreamingSpeechSessionConfig
from vllm_omni.entrypoints.openai.serving_speech_stream import (
    OmniStreamingSpeechHandler,
)

from vllm_tts_cache.entrypoints.http import limits
from vllm_tts_cache.entrypoints.http.routing import caller_of, json_response, tenant_of
from vllm_tts_cache.entrypoints.serving.host_http import invalid_request
from vllm_tts_cache.entrypoints.serving.request_speaker import (
    SPEAKING,
    Speaking,
    with_plain_voice,
)
from vllm_tts_cache.errors import SpeakerRequestError, UnauthorizedError
from vllm_tts_cache.tenants import Tenant, speaking_for

# A session's configuration may bring a clip, for which the host takes 4 MiB.
AHEAD_MAX_BYTES = 8 * 1024 * 1024
# Messages of one unfinished sentence; clients that stream a model's text send words.
_MAX_MESSAGES = 2048
_GONE, _DENIED, _TOO_BIG = 1006, 1008, 1009


class CachedStreamingSpeech(OmniStreamingSpeechHandler):
    """The host's sessions, but each listens to its client all the time.

    The host listens between utterances only: while a reference is fetched or encoded
    it would not see that its client has left.
    """

    async def handle_session(self, websocket: WebSocket) -> None:
        """Serve one connection until client or server closes it."""
        try:
            tenant = tenant_of(caller_of(websocket))
        except SpeakerRequestError as exc:
            try:
                await websocket.send_denial_response(json_response(exc))
            except RuntimeError:  # the server cannot answer a handshake
                await websocket.close(_DENIED)
            return
        seen = _Session(tenant, websocket)
        SPEAKING.set(Speaking())  # not that of who warmed the server up
        with speaking_for(tenant):  # the task keeps the context
            session = asyncio.create_task(super().handle_session(seen))
        reading = asyncio.create_task(seen.read_ahead())
        tasks = {session, reading}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if seen.is_too_much:
            await self._send_error(websocket, "Too much was sent ahead of the speech")
            with suppress(Exception):  # the client may have left
                await websocket.close(_TOO_BIG)
        if not session.cancelled():
            session.result()

    async def _parse_message(
        self, websocket: WebSocket, raw: str
    ) -> dict[str, Any] | None:
        """Parse as the host does; what Python's parser cannot take is refused, too.

        Raises: WebSocketDisconnect, once an utterance is too long.
        """
        try:
            message = await super()._parse_message(websocket, raw)
        except (RecursionError, ValueError):
            await self._send_error(websocket, "Invalid JSON message")
            return None
        if message is None:
            return None
        session = _session(websocket)
        if message.get("type") == "input.done":
            session.pieces.end()
            session.begin()
        text = message.get("text")
        if message.get("type") != "input.text" or not isinstance(text, str):
            return message
        text = session.pieces.feed(text)
        if not session.takes(text):
            reason = f"An utterance has {limits.MAX_INPUT_CHARS:,} characters at most"
            await self._send_error(websocket, reason)
            await session.close(_TOO_BIG)
            raise WebSocketDisconnect(_TOO_BIG)
        return {**message, "text": text}

    async def _build_config(self, websocket: WebSocket, msg: dict[str, Any]) -> Any:
        """Build as the host does; the voice may be an object with an id."""
        try:
            limits.refuse_halves(msg)
            limits.check_speech(msg)
            plain = with_plain_voice(msg)
            _check_fields(plain)
            config = await super()._build_config(websocket, plain)
        except (ValueError, SpeakerRequestError) as exc:
            await self._send_error(websocket, f"Invalid session config: {exc}")
            return None
        if config is not None:
            _session(websocket).is_split = config.split_granularity != "none"
        return config

    async def _generate_and_send(
        self, websocket: WebSocket, *args: Any, **kwargs: Any
    ) -> Any:
        """Speak as the host does, if the tenants file still has the client's key."""
        session = _session(websocket)
        session.begin()
        try:
            if tenant_of(caller_of(session)).name != session.tenant.name:
                raise UnauthorizedError
        except SpeakerRequestError as exc:
            await self._send_error(websocket, str(exc))
            await session.close(_DENIED)
            raise WebSocketDisconnect(_DENIED) from exc
        return await super()._generate_and_send(websocket, *args, **kwargs)


class _Session(WebSocket):
    """A connection as the host sees it; messages are read before the host asks.

    It bounds the bytes that the host has not taken, those that the host has taken since
    its last answer (it may only collect text), and the text that the host holds.

    Attributes:
        tenant: Whose voices it speaks with.
        pieces: Joins the text of an utterance.
        is_split: Whether the host, with each message, searches all the text that it
            holds for the end of a sentence.
    """

    is_split = False
    _num_chars = _num_messages = 0
    _num_ahead = _num_unanswered = 0

    def __init__(self, tenant: Tenant, websocket: WebSocket):
        super().__init__(websocket.scope, self._next, self._pass_on)
        self._websocket = websocket
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self.tenant = tenant
        self.pieces = limits.Pieces()

    @property
    def is_too_much(self) -> bool:
        return max(self._num_ahead, self._num_unanswered) > AHEAD_MAX_BYTES

    async def read_ahead(self) -> None:
        """Return when the client has left, or has sent too much."""
        try:
            while not self.is_too_much:
                message = await self._websocket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                self._num_ahead += _num_bytes(message)
                self._messages.put_nowait(message)
        finally:
            # Before Python 3.12 `wait_for` may swallow a cancellation: a session that
            # outlives it must not wait for a client that has left.
            self._messages.put_nowait({"type": "websocket.disconnect", "code": _GONE})

    async def _next(self) -> Message:
        """Return the next message; a message of bytes gets an empty text."""
        message = await self._messages.get()
        num_bytes = _num_bytes(message)
        self._num_ahead -= num_bytes
        self._num_unanswered += num_bytes
        if message["type"] == "websocket.receive" and message.get("text") is None:
            return {**message, "text": ""}
        return message

    async def _pass_on(self, message: Message) -> None:
        """Send a message. Raises: WebSocketDisconnect each time, if the client left."""
        try:
            await self._websocket.send(message)
        except RuntimeError as exc:
            raise WebSocketDisconnect(_GONE) from exc
        except UnicodeEncodeError:
            # The host repeats to the client what the client sent.
            text = message["text"].encode(errors="replace").decode()
            await self._websocket.send({**message, "text": text})
        self._num_unanswered = 0

    def takes(self, text: str) -> bool:
        """Add a text to what is not spoken yet; returns False if that is too much."""
        held, self._num_chars = self._num_chars, self._num_chars + len(text)
        self._num_messages += self.is_split
        # Where text is split, a sentence may end in this one: only earlier text counts.
        num_chars = held if self.is_split else self._num_chars
        is_too_often = self._num_messages > _MAX_MESSAGES
        return num_chars <= limits.MAX_INPUT_CHARS and not is_too_often

    def begin(self) -> None:
        """Count texts from 0: the host speaks the text that it holds."""
        self._num_chars = self._num_messages = 0


def _check_fields(config: dict[str, Any]) -> None:
    """Refuse what pydantic would, in sentences. Raises: InvalidRequestError."""
    fields = {name: value for name, value in config.items() if name != "type"}
    try:
        StreamingSpeechSessionConfig(**fields)
    except ValidationError as exc:
        errors = [
            {**error, "loc": ("session.config", *error["loc"])}
            for error in exc.errors(include_url=False)
        ]
        raise invalid_request(errors, is_form=False, files=()) from exc


def _session(websocket: WebSocket) -> _Session:
    if not isinstance(websocket, _Session):  # vLLM-Omni 0.32 wraps what it is given
        websocket = websocket._websocket  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(websocket, _Session), "it is served by us"
    return websocket


def _num_bytes(message: Message) -> int:
    # Characters of a text are near enough: most of it is ASCII.
    return len(message.get("text") or message.get("bytes") or b"")
