"""Bodies are bounded while they arrive, not after they were spooled."""

import asyncio
import gc
import json
import warnings

import pytest
from fastapi import APIRouter, FastAPI, File, UploadFile
from pydantic import BaseModel

from tests.asgi import http_scope
from vllm_tts_cache.entrypoints.http import routing

LIMIT = 100_000
JSON = "application/json"


class Order(BaseModel):
    text: str


@pytest.fixture
def app(monkeypatch):
    for limit in ("VOICE_MAX_BYTES", "CHANGES_MAX_BYTES"):
        monkeypatch.setattr(routing, limit, LIMIT)
    router = APIRouter(route_class=routing.GuardedRoute)

    @router.post("/form")
    async def form(file: UploadFile = File()):  # noqa: B008
        return {"size": len(await file.read())}

    @router.post("/none")
    async def none():
        return {}

    @router.post("/left")
    async def left(file: UploadFile | None = File(None)):  # noqa: B008
        return {"has_file": file is not None}

    @router.post("/json")
    async def text(order: Order):
        return {"size": len(order.text)}

    app = FastAPI()
    app.include_router(router)
    return app


async def send(app, path, chunks, content_type, headers=(), leaves=None):
    """POST chunks one by one; returns the status and how many were taken.

    A client that ``leaves`` has more to send, and sends nothing until that.
    """
    num_taken, answer = 0, {}
    head = [(b"content-type", content_type.encode()), *headers]
    scope = http_scope("POST", path, head)

    async def receive():
        nonlocal num_taken
        if num_taken == len(chunks):
            if leaves is not None:
                await leaves.wait()
            return {"type": "http.disconnect"}
        num_taken += 1
        more = leaves is not None or num_taken < len(chunks)
        body = chunks[num_taken - 1]
        return {"type": "http.request", "body": body, "more_body": more}

    async def take(message):
        answer.setdefault("status", message.get("status"))
        answer["body"] = answer.get("body", b"") + message.get("body", b"")

    await app(scope, receive, take)
    return answer["status"], json.loads(answer["body"]), num_taken


def form_chunks(num_bytes):
    head = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n'
        b"Content-Type: audio/wav\r\n\r\n"
    )
    return [head, *[bytes(10_000)] * (num_bytes // 10_000), b"\r\n--b--\r\n"]


@pytest.mark.parametrize("path", ["/form", "/json"])
async def test_a_body_that_says_it_is_too_large_is_not_read_at_all(app, path):
    length = [(b"content-length", str(LIMIT + 1).encode())]
    chunks = [bytes(10_000)] * 20
    status, answer, taken = await send(app, path, chunks, JSON, length)
    assert (status, taken) == (413, 0)
    assert "larger than" in answer["error"]["message"]


async def test_escapes_are_counted_while_they_arrive(app, monkeypatch):
    """Those of 57 MiB held the event loop up for 0.2 s, when they were parsed."""
    monkeypatch.setattr(routing, "JSON_MAX_PARTS", 1000)
    for num_texts, found in ((4, (200, 6)), (8, (400, 6))):
        texts = [b"\\u00e9" * 1000] * num_texts
        chunks = [b'{"text": "', *texts, b'"}']
        status, _, taken = await send(app, "/json", chunks, JSON)
        assert (status, taken) == found


async def test_a_length_that_lies_does_not_help(app):
    length = [(b"content-length", b"10")]
    chunks = [b'{"text": "', *[b"x" * 10_000] * 100, b'"}']
    status, _, taken = await send(app, "/json", chunks, JSON, length)
    assert status == 413
    assert taken < 20


FORM = "multipart/form-data; boundary=b"


@pytest.mark.parametrize("path", ["/form", "/json"])
async def test_a_large_body_that_stops_coming_is_not_waited_for(app, path, monkeypatch):
    """Each was bounded, and their number was not: they filled memory and TMPDIR."""
    monkeypatch.setattr(routing, "PATIENCE_SECONDS", 0.2)
    half = send(app, path, form_chunks(80_000)[:-1], FORM, leaves=asyncio.Event())
    status, answer, _ = await asyncio.wait_for(half, 60)
    assert status == 408
    assert "64 KiB a second" in answer["error"]["message"]
    assert routing.BoundedRequest.num_arriving == 0


async def test_bodies_that_arrive_are_bounded_together(app, monkeypatch):
    monkeypatch.setattr(routing, "ARRIVING_MAX_BYTES", 150_000)
    left, half = asyncio.Event(), form_chunks(80_000)[:-1]
    first = asyncio.create_task(send(app, "/form", half, FORM, leaves=left))
    while routing.BoundedRequest.num_arriving < 80_000:
        await asyncio.sleep(0)
    status, answer, taken = await send(app, "/form", form_chunks(90_000), FORM)
    assert status == 503
    assert "too many large bodies" in answer["error"]["message"]
    assert taken < 10
    small = await send(app, "/form", form_chunks(50_000), FORM)
    assert small[0] == 200  # it is none of its business
    left.set()
    assert (await first)[0] == 400
    assert routing.BoundedRequest.num_arriving == 0


@pytest.mark.parametrize("cut", [b"\r\n--b--\r\n", b"--\r\n", b"-\r\n"])
async def test_a_form_that_ends_inside_a_part_is_refused_and_leaves_no_file(app, cut):
    """Of a part that was begun, and of one that another one follows."""
    for before in ([], [*form_chunks(20_000)[:-1], b"\r\n"]):
        *chunks, last = before + form_chunks(50_000)
        cut_off = [*chunks, last.removesuffix(cut), b""]
        with warnings.catch_warnings(record=True) as unclosed:
            warnings.simplefilter("always")
            status, answer, _ = await send(app, "/form", cut_off, FORM)
            gc.collect()
        assert (status, unclosed) == (400, [])
        assert "closing boundary" in answer["error"]["message"]


@pytest.mark.parametrize(
    "end",
    [
        b"--b--\r\n",  # where a line of the part is expected, and taken for it
        b"\r\n--b--",
    ],
)
async def test_a_line_as_the_end_where_it_is_none_ends_no_form(app, end):
    head, *_ = form_chunks(0)
    head = head.removesuffix(b"\r\n")
    with warnings.catch_warnings(record=True) as unclosed:
        warnings.simplefilter("always")
        status, answer, _ = await send(app, "/left", [head + end], FORM)
        gc.collect()
    assert (status, unclosed) == (400, []), answer


@pytest.mark.parametrize("boundary", ["b" * 300, "", "=", '"b\\"'])
async def test_what_the_parser_says_of_a_form_stays(app, boundary):
    kind = f"multipart/form-data; boundary={boundary}"
    status, answer, _ = await send(app, "/left", [b"--b\r\n", b"--b--"], kind)
    assert (status, answer) == (400, {"detail": "Invalid multipart data."})


async def test_other_bodies_are_none_of_its_business(app):
    for path in ("/json", "/none"):
        status, answer, _ = await send(app, path, [b"{}"], FORM)
        assert "closing boundary" not in json.dumps(answer)
    assert (status, answer) == (200, {})


async def test_a_forms_end_is_found_wherever_it_is_cut(app):
    whole = b"".join(form_chunks(20_000))
    for where in range(len(whole) - 12, len(whole)):
        cut = whole[where : where + 3], whole[where + 3 :]
        chunks = [whole[:where], *cut, b"behind"]
        status, answer, _ = await send(app, "/form", chunks, FORM)
        assert (status, answer) == (200, {"size": 20_000})


async def test_a_form_without_parts_is_whole(app):
    status, answer, _ = await send(app, "/form", [b"--b--"], FORM)
    assert status == 400
    assert "Invalid file: it is missing" in answer["error"]["message"]
