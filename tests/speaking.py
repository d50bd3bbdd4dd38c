"""Clips to speak with, and every way in which a client asks for speech."""

import asyncio
import base64
import json
from typing import Any

import numpy as np
from vllm_omni.entrypoints.openai.protocol.audio import StreamingSpeechSessionConfig

from tests.audio_clips import sndfile_bytes, voiced
from tests.waiting import wait_until


def wav(container="WAV", **kwargs):
    # Integers: libsndfile rounds floats differently for each container.
    samples = (voiced(**kwargs) * 32767).astype(np.int16)
    return sndfile_bytes(samples, 24_000, container)


def data_url(**kwargs):
    return f"data:audio/wav;base64,{base64.b64encode(wav(**kwargs)).decode()}"


async def plainly(server, **fields):
    return await server.speak(**fields)


async def as_raw_stream(server, **fields):
    return await server.speak(
        stream=True, stream_format="audio", response_format="pcm", **fields
    )


async def as_events(server, **fields):
    return await server.speak(
        stream=True, stream_format="sse", response_format="pcm", **fields
    )


async def in_a_batch(server, **fields):
    """One item; returns its error, None if it was spoken."""
    answer = await server.client.post(
        "/v1/audio/speech/batch", json={"items": [{"input": "Hi."}], **fields}
    )
    assert answer.status_code == 200
    return answer.json()["results"][0].get("error")


async def by_websocket(server, key=None, **fields):
    """One utterance, streamed; returns its error, None if it was spoken."""
    authorization = (
        [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    )
    told = asyncio.Queue()
    for message in (
        {"type": "session.config", "stream_audio": True, "response_format": "pcm"}
        | fields,
        {"type": "input.text", "text": "Hello."},
        {"type": "input.done"},
    ):
        told.put_nowait({"type": "websocket.receive", "text": json.dumps(message)})
    told_first, said = [{"type": "websocket.connect"}], []

    async def receive():
        return told_first.pop() if told_first else await told.get()

    async def send(message):
        said.append(message)
        if "session.done" in message.get("text", ""):
            told.put_nowait({"type": "websocket.disconnect", "code": 1000})

    scope = {
        "type": "websocket",
        "path": "/v1/audio/speech/stream",
        "raw_path": b"",
        "query_string": b"",
        "headers": authorization,
        "subprotocols": [],
        "scheme": "ws",
        "root_path": "",
        "app": server.app,
    }
    await server.app(scope, receive, send)
    texts = [json.loads(m["text"]) for m in said if m.get("text")]
    errors = [text["message"] for text in texts if text["type"] == "error"]
    num_bytes = sum(len(m["bytes"]) for m in said if m.get("bytes"))
    assert errors or num_bytes > 0, texts
    return errors[0] if errors else None


async def by_commitment(server, **fields):
    """The same; the host speaks what it is sure of while texts arrive (since 0.32)."""
    mode = {"text_input_mode": "commitment", "language": "English"}
    return await by_websocket(server, **mode, **fields)


async def registered(server, name="Ann", **kwargs):
    done = await server.register(name, wav(**kwargs), ref_text="words")
    assert done.status_code == 200, done.text
    assert (await server.client.post(f"/v1/audio/voices/{name}/cache")).is_success
    return done.json()["voice"]["audio_sha256"]


def lose_files(server, sha):
    """Somebody removed the encodings; the catalogue does not know."""
    # The file of an encoding is there before its job is over.
    wait_until(lambda: not server.speakers.stats().in_flight)
    for path in (server.directory / "store").rglob("*.safetensors"):
        if path.stem != "audio":
            path.unlink()
    server.speakers.delete([sha])


BY_SOCKET = (by_websocket, by_commitment)
if "text_input_mode" not in StreamingSpeechSessionConfig.model_fields:
    BY_SOCKET = (by_websocket,)
WAYS = (plainly, as_raw_stream, as_events, in_a_batch, *BY_SOCKET)


async def each_way(server):
    """Every way to speak with a voice that is ready, with the address of its clip."""
    for speak in WAYS:
        sha = await registered(server)
        server.engine.prompts.clear()
        server.engine.before_prefill = []
        yield speak, sha


async def refusal(speak, server, **fields) -> Any:
    """The status and text of an error; a status of 0 where the way tells none.

    None if it was spoken.
    """
    answer = await speak(server, **fields)
    if answer is None or isinstance(answer, str):
        return None if answer is None else (0, answer)
    if answer.status_code == 200:
        assert len(answer.content) > 4_800 and b"error" not in answer.content
        assert answer.headers["X-Speaker-Cache"] in ("hit", "miss")
        return None
    assert answer.status_code != 503 or int(answer.headers["Retry-After"]) > 0
    return answer.status_code, answer.json()["error"]["message"]
