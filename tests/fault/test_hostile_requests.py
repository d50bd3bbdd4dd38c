"""Every route of ours with hostile input: it is refused, and nothing of it stays."""

import asyncio
import contextlib
import json
import tempfile
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from hypothesis import given
from hypothesis import strategies as st
from vllm_omni.entrypoints.openai.serving_audio_generate import (
    OmniOpenAIServingAudioGenerate,
)

from tests.asgi import http_scope
from tests.fault.held import Held, held_at_rest, with_all_threads
from tests.fault.hostile_input import CONSENTS, NUM_CASES, VOICES, cases, so_many
from tests.speech_server import Server, running

AT_ONCE = 4
# The host's own, for a path or a method that is nobody's.
OF_NO_ROUTE = b'{"detail":"Not Found"}', b'{"detail":"Method Not Allowed"}'


@dataclass
class Answer:
    """What came back, headers in lower case."""

    status: int = 0
    headers: dict = field(default_factory=dict)
    body: bytes = b""


async def send(server, case):
    """Over the ASGI interface, as a server that checks nothing would pass it on."""
    path, _, query = case.path.partition("?")
    scope = http_scope(
        case.method,
        unquote(path),
        case.headers.items(),
        query=query.encode(),
        raw_path=path.encode(),
    )
    half = len(case.body) // 2
    chunks = [case.body[half:], case.body[:half]]
    answer = Answer()

    async def receive():
        if not chunks:
            await asyncio.Event().wait()
        body = chunks.pop()
        return {"type": "http.request", "body": body, "more_body": bool(chunks)}

    async def tell(message):
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.lower(): v for k, v in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    # What the host's last handler answers with a 500 is raised as well.
    with contextlib.suppress(Exception):
        await server.app(scope, receive, tell)
    return answer


def problem(case, answer):
    """What is wrong with an answer, whatever was sent; None if nothing is."""
    status = answer.status
    if 200 <= status < 400:
        return None
    if not 400 <= status < 500 and status not in (503, 507):
        return f"{status} {answer.body[:300]}"
    if status == 503 and int(answer.headers.get(b"retry-after", 0)) < 1:
        return "503 without Retry-After"
    if case.method == "HEAD" or answer.body in OF_NO_ROUTE:
        return None
    error = json.loads(answer.body).get("error", {})
    if {"message", "type", "param", "code"} <= error.keys() and error["code"] == status:
        return None
    return f"not the host's shape: {answer.body[:300]}"


async def emptied(server):
    """All voices are deleted by the API, and nothing is left to do."""
    while names := (await server.client.get(VOICES)).json()["uploaded_voices"]:
        for voice in names:
            path = f"{VOICES}/{quote(voice['name'], safe='')}"
            answer = await server.client.delete(path)
            assert answer.status_code == 200, answer.text
    while kept := (await server.client.get(CONSENTS)).json()["data"]:
        for consent in kept:
            answer = await server.client.delete(f"{CONSENTS}/{consent['id']}")
            assert answer.status_code == 200, answer.text
    await server.settled()
    store = server.service.store
    while store.num_unfinished_deletions() or server.service.encodings.pending:
        await asyncio.sleep(0.05)


def num_bytes(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


async def check_what_is_left(server, directory):
    shown = (await server.client.get("/v1/audio/speaker_cache")).json()
    assert shown["registry"] == {"speakers": 0}
    assert shown["flights"] == 0
    registered, inline = shown["storage"]["registered"], shown["storage"]["inline"]
    assert {kind["files"] for kind in registered.values()} == {0}
    known = sum(kind["bytes"] for kind in inline.values())
    assert num_bytes(directory / "store") == known
    for folder in ("trash", "partial"):
        assert num_bytes(directory / folder) == 0, folder
    assert server.service.store.verify() == []


def test_no_request_is_a_fault_or_leaves_any(default_checkpoint, tmp_path, monkeypatch):
    spooled = tmp_path / "spooled"
    spooled.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spooled))
    loop = asyncio.new_event_loop()
    faults, problems = [], {}
    loop.set_exception_handler(lambda _, context: faults.append(context))
    server = Server(default_checkpoint, tmp_path / "speakers", monkeypatch)

    async def together(some):
        answers = await asyncio.gather(*(send(server, case) for case in some))
        for case, answer in zip(some, answers, strict=True):
            if (found := problem(case, answer)) is not None:
                problems.setdefault(found[:120], f"{found}: {case}")

    @so_many(-(-NUM_CASES // AT_ONCE))
    @given(some=st.lists(cases, min_size=AT_ONCE, max_size=AT_ONCE))
    def hostile(some):
        loop.run_until_complete(together(some))

    async def begin():
        await context.__aenter__()
        server.app.state.openai_serving_audio_generate = OmniOpenAIServingAudioGenerate(
            server.engine, server.handler.models, request_logger=None, model_name="m"
        )
        await with_all_threads(server)

    context = running(server)
    loop.run_until_complete(begin())
    try:
        before = Held(loop)
        hostile()
        assert not problems, "\n\n".join(problems.values())
        loop.run_until_complete(emptied(server))
        loop.run_until_complete(check_what_is_left(server, tmp_path / "speakers"))
        after = held_at_rest(loop, before)
        assert not faults
        assert after.tasks <= before.tasks, (before, after)
        after.assert_no_more_than(before)
        assert [path for path in spooled.iterdir() if path.is_file()] == []
    finally:
        loop.run_until_complete(context.__aexit__(None, None, None))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
