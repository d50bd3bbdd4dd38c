"""Many clients that ask for something dear, and leave before it comes."""

import asyncio
import base64
import itertools
import json
import threading
import time
from typing import Any

import pytest
from websockets.asyncio.client import connect

from tests.audio_clips import sndfile_bytes, voiced
from tests.fault.held import ON_DEMAND, Held, tasks_of, with_all_threads
from tests.fault.hostile_input import NUM_CASES
from tests.in_process_workers import order_of
from tests.speaking import wav
from tests.speech_server import Server, listening, running
from tests.unit import test_inline
from tests.unit.test_inline import CountingHandler
from tests.waiting import soon

NUM_CLIENTS = max(80, min(NUM_CASES // 4, 200))
AT_ONCE = 40  # fewer than may wait to be decoded

media, web = test_inline.media, test_inline.web


pytestmark = pytest.mark.environment(
    SPEAKER_CACHE_MAX_WAITING_INLINE=str(2 * NUM_CLIENTS),
    SPEAKER_CACHE_MAX_FETCHES=str(2 * NUM_CLIENTS),
    SPEAKER_CACHE_FETCH_NETWORKS="127.0.0.0/8",
    VLLM_AUDIO_FETCH_TIMEOUT="600",  # nothing ends by itself here
)


@pytest.fixture
async def server(server):
    await with_all_threads(server)
    return server


def clip(number):
    samples = voiced(8_000, 1.1, pitch_hz=120 + number)
    data = sndfile_bytes((samples * 32767).astype("int16"), 8_000, "WAV")
    return f"data:audio/wav;base64,{base64.b64encode(data).decode()}"


def fields_of(url):
    return {"input": "Hi.", "ref_audio": url, "x_vector_only_mode": True}


class Answer(asyncio.Protocol):
    """What the server told, so far."""

    def __init__(self):
        self.received = b""

    def data_received(self, data):
        self.received += data

    @property
    def status(self):
        return int(self.received.split()[1]) if self.received else None


async def posted(port, path, fields):
    """A connection on which an answer would come."""
    loop = asyncio.get_running_loop()
    connection, _ = await loop.create_connection(Answer, "127.0.0.1", port)
    body = json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: s\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection.write(head.encode() + body)
    return connection


async def plainly(port, url):
    return await posted(port, "/v1/audio/speech", fields_of(url))


async def as_a_stream(port, url):
    how = {"stream": True, "stream_format": "audio", "response_format": "pcm"}
    return await posted(port, "/v1/audio/speech", fields_of(url) | how)


async def in_a_batch(port, url):
    fields = {"items": [fields_of(url)]}
    return await posted(port, "/v1/audio/speech/batch", fields)


async def by_websocket(port, url):
    socket = await connect(f"ws://127.0.0.1:{port}/v1/audio/speech/stream")
    config = {"type": "session.config", "ref_audio": url, "x_vector_only_mode": True}
    spoken = {"type": "input.text", "text": "Hi."}
    for message in (config, spoken, {"type": "input.done"}):
        await socket.send(json.dumps(message))
    return socket.transport


WAYS = pytest.mark.parametrize(
    "ask",
    [
        plainly,
        by_websocket,
        pytest.param(as_a_stream, marks=pytest.mark.long),
        pytest.param(in_a_batch, marks=pytest.mark.long),
    ],
)


async def leave(connections):
    """Half of them with a farewell, half without."""
    for connection, politely in zip(connections, itertools.cycle([True, False])):
        if politely:
            connection.close()
        else:
            connection.abort()


def num_waiting(server):
    """Clients, encodings and clips that something is done for."""
    inline = server.service.inline
    in_hand = (
        len(inline._fetches) + len(inline._decodes) + inline._executor._num_pending
    )
    return len(server.service.encodings.pending) + in_hand


async def nothing_is_left(server, before):
    await soon(lambda: num_waiting(server) == 0)
    await soon(lambda: server.speakers.stats().in_flight == 0)
    await soon(lambda: server.service.encodings.pending._task is None)
    loop = asyncio.get_running_loop()
    await soon(lambda: len(tasks_of(loop)) <= before.tasks)
    # The web server of the test has a thread for each connection until it notices.
    await soon(lambda: threading.active_count() <= before.threads + ON_DEMAND)
    Held(loop).assert_no_more_than(before)
    assert server.service.store.verify() == []


@WAYS
async def test_who_waits_for_an_encode_and_leaves_holds_nobody_up(server, ask):
    """A registered voice waited 41 s behind 200 abandoned jobs of 0.2 s."""
    speaker = server.encoders[0]
    encoded = order_of(speaker)
    async with listening(server.app) as port:
        before = Held(asyncio.get_running_loop())
        speaker.gate.clear()
        connections, ensurer = [], server.service.encodings
        for first in range(0, NUM_CLIENTS, AT_ONCE):
            some = range(first, first + AT_ONCE)
            connections += [await ask(port, clip(number)) for number in some]
            await soon(lambda so_far=some.stop: len(ensurer.pending) == so_far)
        await soon(speaker.entered.is_set)
        await leave(connections)
        await soon(lambda: len(ensurer.pending) == 0)
        done = await server.register("Ann", wav(pitch_hz=90), ref_text="words")
        assert done.status_code == 200, done.text
        ann = done.json()["voice"]["audio_sha256"]
        speaking = asyncio.create_task(server.speak(voice="Ann"))
        await soon(lambda: server.speakers.stats().waiting["registered"] == 2)
        speaker.gate.set()
        answer = await speaking
        assert (answer.status_code, answer.headers["X-Speaker-Cache"]) == (200, "miss")
        assert encoded[1] == ann  # after the one that was in hand
        await nothing_is_left(server, before)


@WAYS
async def test_who_waits_for_a_fetch_and_leaves_takes_it_along(server, web, ask):
    """200 fetches ran on, and stopped those of everybody else."""
    fetches = server.service.inline._fetches
    async with listening(server.app) as port:
        before = Held(asyncio.get_running_loop())
        connections = [
            await ask(port, f"{web}/drip?{number}") for number in range(NUM_CLIENTS)
        ]
        await soon(lambda: len(fetches) == NUM_CLIENTS)
        await leave(connections)
        await soon(lambda: not fetches)
        began = time.monotonic()
        answer = await server.speak(**fields_of(f"{web}/clip.wav"))
        assert answer.status_code == 200, answer.text
        assert time.monotonic() - began < 10.0
        CountingHandler.gate.set()
        await nothing_is_left(server, before)


@pytest.mark.parametrize("path", ["encode", "fetch"])
async def test_what_is_too_much_is_refused_and_the_rest_leaves_nothing(
    default_checkpoint, tmp_path, monkeypatch, path, web
):
    """At the bounds that a server has without any setting."""
    monkeypatch.setenv("SPEAKER_CACHE_FETCH_NETWORKS", "127.0.0.0/8")
    directory = tmp_path / "speakers"
    async with (
        running(Server(default_checkpoint, directory, monkeypatch)) as server,
        listening(server.app) as port,
    ):
        await with_all_threads(server)
        before = Held(asyncio.get_running_loop())
        server.encoders[0].gate.clear()
        connections = [
            await plainly(port, clip(n) if path == "encode" else f"{web}/drip?{n}")
            for n in range(NUM_CLIENTS)
        ]
        answers: list[Any] = [c.get_protocol() for c in connections]
        num_served = 64 if path == "encode" else 16
        await soon(lambda: num_answered(answers) >= NUM_CLIENTS - num_served)
        await asyncio.sleep(0.1)
        assert num_answered(answers) == NUM_CLIENTS - num_served
        assert {answer.status for answer in answers} == {503, None}
        assert all(b"retry-after" in a.received for a in answers if a.received)
        await leave(connections)
        await soon(lambda: num_waiting(server) == 0)
        server.encoders[0].gate.set()
        CountingHandler.gate.set()
        await nothing_is_left(server, before)


def num_answered(answers):
    return sum(answer.status is not None for answer in answers)
