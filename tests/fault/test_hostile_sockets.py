"""The speech WebSocket with hostile frames: it is refused, and the next one speaks."""

import asyncio
import contextlib
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.fault.held import Held, tasks_of, with_all_threads
from tests.fault.hostile_input import (
    NAMES,
    NUM_CASES,
    clip,
    names,
    so_many,
    texts,
    urls,
    values,
)
from tests.speech_server import Server, listening, running

ANSWER_SECONDS = 60.0
PATH = "/v1/audio/speech/stream"
AHEAD_MAX_BYTES = 8 * 1024**2  # as docs/http-api.md says

CONFIG, DONE = {"type": "session.config", "voice": "Ann"}, {"type": "input.done"}


_OF_ANY_VALUE = "model language speed max_new_tokens initial_codec_chunk_frames seed "
_OF_ANY_VALUE += "non_streaming_mode speaker_embedding type self"
_CONFIG = dict.fromkeys(_OF_ANY_VALUE.split(), values) | {
    "voice": names | values,
    "speaker": names,
    "task_type": st.sampled_from(["Base", "CustomVoice", "VoiceDesign"]) | values,
    "instructions": texts | values,
    "response_format": st.sampled_from(["wav", "pcm", "flac", "mp3"]) | values,
    "ref_audio": urls | values,
    "ref_text": texts | values,
    "x_vector_only_mode": st.booleans() | values,
    "stream_audio": st.booleans() | values,
    "word_timestamps": st.booleans() | values,
    "split_granularity": st.sampled_from(["none", "sentence", "clause"]) | values,
}


@st.composite
def configs(draw):
    """A good configuration of which some fields are nothing that they should be."""
    fields = {"type": "session.config", "voice": draw(st.sampled_from(NAMES))}
    for name in draw(st.lists(st.sampled_from(sorted(_CONFIG)), max_size=3)):
        fields[name] = draw(_CONFIG[name])
    return fields


good_config = st.fixed_dictionaries(
    {
        "type": st.just("session.config"),
        "voice": st.just("Ann"),
        "split_granularity": st.sampled_from(["none", "sentence", "clause"]),
    },
    optional={
        "stream_audio": st.just(True),
        "response_format": st.just("pcm"),
        "x_vector_only_mode": st.just(True),
    },
)
spoken = st.fixed_dictionaries(
    {"type": st.just("input.text"), "text": st.sampled_from(["Hi. ", "No", " "])}
)
messages = st.one_of(
    *2 * [good_config, configs(), spoken, st.just(DONE)],
    st.fixed_dictionaries({"type": st.just("input.text"), "text": texts | values}),
    st.just({"type": "session.close"}),
    st.fixed_dictionaries({"type": texts | values}, optional={"text": texts}),
    st.dictionaries(texts, values, max_size=3),
)
RAW = [
    "",
    "{",
    "null",
    "[]",
    '"input.done"',
    "[" * 50_000,
    '{"a":' * 20_000,
    '{"type": ' + "9" * 5000 + "}",
    '{"type": "input.text", "text": "\\ud800"}',
    '{"type": "session.config", "voice": "\\udc00"}',
    '{"type": "input.text", "text": "' + "." * 100_000 + '"}',
    '{"type": "input.text", "text": "' + "x" * 200_000 + '"}',
    '{"type": "session.config", "ref_audio": "' + "x" * 5 * 1024**2 + '"}',
]
frames = st.one_of(
    *3 * [messages.map(json.dumps)],
    messages.map(lambda message: [*map(str, json.dumps(message))]),  # in fragments
    st.sampled_from(RAW),
    st.binary(max_size=50),
    st.just(bytes(100_000)),
)
ENDINGS = ["waits", "closes", "aborts", "breaks the protocol", "half a frame"]
NOT_A_FRAME = b"\xff" * 50
HALF_A_FRAME = b"\x81\xfe\x10\x00\x00\x00\x00\x00{"


async def session(port, sent, ending):
    """Send frames, end, and return what was told."""
    url = f"ws://127.0.0.1:{port}{PATH}"
    told = []

    async def heard():
        async for message in socket:
            told.append(message)

    try:
        async with connect(url, max_size=None, close_timeout=1) as socket:
            for frame in sent:
                await socket.send(frame)
            if ending == "waits":
                await socket.send(json.dumps({"type": "session.close"}))
            elif ending == "aborts":
                socket.transport.abort()
            elif ending == "breaks the protocol":
                socket.transport.write(NOT_A_FRAME)
            elif ending == "half a frame":
                socket.transport.write(HALF_A_FRAME)
                socket.transport.write_eof()
            if ending != "closes":
                await asyncio.wait_for(heard(), ANSWER_SECONDS)
    except (ConnectionClosed, ConnectionError, EOFError):
        pass
    return told


async def said(socket, *messages):
    for message in messages:
        await socket.send(json.dumps(message))


async def speaks(port):
    """A connection that is as it should be."""
    url = f"ws://127.0.0.1:{port}{PATH}"
    num_bytes = 0
    async with connect(url) as socket:
        await said(socket, CONFIG, {"type": "input.text", "text": "Hello."}, DONE)
        async for message in socket:
            if isinstance(message, bytes):
                num_bytes += len(message)
            elif (told := json.loads(message))["type"] == "session.done":
                break
            else:
                assert told["type"] != "error", told
    return num_bytes > 1_000


class Faults(logging.Handler):
    """What the web server logs of an application that failed, or the host of itself."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.found = []

    def emit(self, record):
        if record.exc_info:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


@contextlib.contextmanager
def watched():
    faults = Faults()
    names = ("uvicorn.error", "vllm.vllm_tts_cache", "asyncio")
    hosts = "vllm_omni.entrypoints.openai.serving_speech_stream"
    loggers = [logging.getLogger(name) for name in (*names, hosts)]
    for logger in loggers:
        logger.addHandler(faults)
    try:
        yield faults
    finally:
        for logger in loggers:
            logger.removeHandler(faults)


def test_no_frame_is_a_fault_or_leaves_any(default_checkpoint, tmp_path, monkeypatch):
    loop = asyncio.new_event_loop()
    server = Server(default_checkpoint, tmp_path / "speakers", monkeypatch)
    stack = contextlib.AsyncExitStack()
    problems = {}

    async def begin():
        await stack.enter_async_context(running(server))
        port = await stack.enter_async_context(listening(server.app))
        await with_all_threads(server)
        done = await server.register("Ann", clip("wav"), ref_text="words")
        assert done.is_success and await speaks(port)
        return port

    async def one(port, sent, ending, faults):
        told = await session(port, sent, ending)
        texts = [json.loads(text) for text in told if isinstance(text, str)]
        told = [message.get("message", "") for message in texts]
        faults.found += [text for text in told if "Internal error" in text]
        assert await asyncio.wait_for(speaks(port), ANSWER_SECONDS)
        for fault in faults.found:
            problems.setdefault(fault[:80], f"{fault}: {sent!r:.1500} {ending}")
        faults.found.clear()

    async def settled():
        until = loop.time() + ANSWER_SECONDS
        service = server.service
        while service.encodings.pending or len(tasks_of(loop)) > before.tasks:
            assert loop.time() < until, asyncio.all_tasks()
            await asyncio.sleep(0.05)

    @so_many(NUM_CASES // 4)
    @given(
        sent=st.lists(frames, max_size=6),
        begins_well=st.booleans(),
        ending=st.sampled_from(ENDINGS),
    )
    def hostile(sent, begins_well, ending):
        if begins_well:
            sent = [json.dumps(CONFIG), *sent]
        loop.run_until_complete(one(port, sent, ending, faults))

    port = loop.run_until_complete(begin())
    try:
        before = Held(loop)
        before.tasks += 1  # that of the question itself
        with watched() as faults:
            hostile()
        assert not problems, "\n\n".join(problems.values())
        loop.run_until_complete(settled())
        after = Held(loop)
        after.assert_no_more_than(before)
        assert server.service.store.verify() == []
    finally:
        loop.run_until_complete(stack.aclose())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def floods(socket, num_bytes):
    """Send texts until the server has had enough; returns why it ended."""
    text = json.dumps({"type": "input.text", "text": "x" * 100_000})
    try:
        for _ in range(num_bytes // len(text)):
            await socket.send(text)
        await asyncio.wait_for(socket.wait_closed(), ANSWER_SECONDS)
    except ConnectionClosed:
        pass
    return socket.close_code


@pytest.mark.parametrize(
    ("granularity", "text", "told"),
    [
        ("none", 1_000 * "x", [{"type": "input.text", "text": 1_000 * "x"}]),
        # An error told on the way takes nothing back of what is kept.
        ("none", 1_000 * "x", [{"type": "x"}, {"type": "input.text"}]),
        # Each is looked through from where its sentence may end.
        ("sentence", ".", []),
        ("clause", "a", []),
    ],
)
async def test_a_client_that_never_flushes_is_cut_off(server, granularity, text, told):
    """The host kept all of it, as long as somebody sent any."""
    config = {"type": "session.config", "split_granularity": granularity}
    seen = []
    async with (
        listening(server.app) as port,
        connect(f"ws://127.0.0.1:{port}{PATH}", close_timeout=1) as socket,
    ):
        await said(socket, config)
        with contextlib.suppress(ConnectionClosed):
            for _ in range(3_000):
                await said(socket, {"type": "input.text", "text": text}, *told)
                with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                    seen.append(await asyncio.wait_for(socket.recv(), 0.001))
            await asyncio.wait_for(socket.wait_closed(), ANSWER_SECONDS)
        with contextlib.suppress(ConnectionClosed):
            while True:
                seen.append(await asyncio.wait_for(socket.recv(), ANSWER_SECONDS))
        assert socket.close_code == 1009
    assert "An utterance has" in json.loads(seen[-1])["message"]


async def test_a_client_that_flushes_says_as_much_as_it_likes(server):
    async with (
        listening(server.app) as port,
        connect(f"ws://127.0.0.1:{port}{PATH}", close_timeout=1) as socket,
    ):
        await said(socket, {"type": "session.config"})
        for _ in range(3):
            await said(socket, {"type": "input.text", "text": 20_000 * " "}, DONE)
            done = json.loads(await asyncio.wait_for(socket.recv(), ANSWER_SECONDS))
            assert done["type"] == "session.done"


async def test_a_client_that_sends_ahead_of_a_cold_voice_is_cut_off(server):
    server.encoders[0].gate.clear()
    await server.register("Ann", clip("wav"), ref_text="words")
    ensurer = server.service.encodings
    async with listening(server.app) as port:
        async with connect(f"ws://127.0.0.1:{port}{PATH}", close_timeout=1) as socket:
            await said(socket, CONFIG, {"type": "input.text", "text": "Hi."}, DONE)
            while len(ensurer.pending) == 0:
                await asyncio.sleep(0.01)
            assert await floods(socket, 2 * AHEAD_MAX_BYTES) == 1009
            assert len(ensurer.pending) == 0
        server.encoders[0].gate.set()
        assert await asyncio.wait_for(speaks(port), ANSWER_SECONDS)
