"""What is wrong with a request is said in sentences, and without what was sent."""

import itertools
import json
from typing import Any

from fastapi import FastAPI

from tests.speaking import by_websocket, data_url, in_a_batch, wav
from vllm_tts_cache.entrypoints.attach import routers

VOICES, CONSENTS = "/v1/audio/voices", "/v1/audio/voice_consents"
SPEECH = "/v1/audio/speech"
JUNK = "\u00ff\u00fe" * 2000
PYTHON = ("{'", "['", "'type':", "'loc':", "<class", "validation error")
FORMS = {  # each route that takes a file, with the name of that field
    VOICES: "audio_sample",
    f"{VOICES}/check": "audio_sample",
    f"{VOICES}/import": "bundle",
    CONSENTS: "recording",
}


def message(answer):
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == 400
    assert not any(sign in error["message"] for sign in PYTHON), error["message"]
    return error["message"]


IS_MISSING = "it is missing. Send it"
AS_FORM, AS_JSON = "as a field of the form", "in the JSON body"
AS_FILE = "as a file: its part of the form needs a filename (curl: -F {}=@clip.wav)"


TOO_FAST = "Invalid speed: 9 was sent, and it should be less than or equal to 4."

# Where it is sent -> what is told.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (VOICES, {"data": {"consent": "y"}}, f"Invalid name: {IS_MISSING} {AS_FORM}."),
    (
        CONSENTS,
        {"data": {"language": "de"}},
        (
            f"Invalid name: {IS_MISSING} {AS_FORM}. "
            f"Invalid recording: {IS_MISSING} {AS_FILE.format('recording')}."
        ),
    ),
    (SPEECH, {"json": {"voice": "a"}}, f"Invalid input: {IS_MISSING} {AS_JSON}."),
    (
        f"{SPEECH}/batch",
        {"json": {"items": [{"voice": "a"}]}},
        f"Invalid items.0.input: {IS_MISSING} {AS_JSON}.",
    ),
    (SPEECH, {"json": {"input": "Hi.", "speed": 9}}, TOO_FAST),
    (
        SPEECH,
        {"json": {"input": ["Hi."], "stream": "ja"}},
        (
            "Invalid input: a list was sent, and it should be a valid string. "
            "Invalid stream: 'ja' was sent, and it should be a valid boolean, "
            "unable to interpret input."
        ),
    ),
    (
        SPEECH,
        {"json": {"input": "Hi.", "voice": {"name": "a"}}},
        "Invalid voice: voice dict must contain 'id'.",
    ),
    (
        SPEECH,
        {"content": b'{"input": ', "headers": {"Content-Type": "application/json"}},
        "Invalid body: it is not JSON (Expecting value, character 10).",
    ),
    (
        SPEECH,
        {"json": {"input": "Hi.", "speaker_embedding": [1], "ref_audio": "a"}},
        "Invalid body: 'speaker_embedding' and 'ref_audio' are mutually exclusive.",
    ),
    (
        SPEECH,
        {"json": ["Hi."]},
        (
            "Invalid body: it is no JSON object. Send one, as Content-Type: "
            "application/json."
        ),
    ),
    (
        SPEECH,
        {"content": b"Hi."},
        (
            "Invalid request: Unsupported Media Type: Only 'application/json' is "
            "allowed."
        ),
    ),
    (
        f"{VOICES}/import",
        {"data": {"on_conflict": "x" * 99}, "files": {"bundle": b"no bundle"}},
        (
            f"Invalid on_conflict: '{'x' * 64}'… was sent, and it should be "
            "'fail', 'replace' or 'rename'."
        ),
    ),
]
WRONG_SESSIONS: list[tuple[dict[str, Any], str]] = [
    ({"speed": 9}, TOO_FAST),
    (
        {"response_format": "wav"},
        "Invalid session.config: WebSocket streaming audio (stream_audio=true) req",
    ),
    ({"voice": ["a"]}, "Invalid voice: a list was sent, and it should be a valid"),
]


async def test_a_field_that_is_missing_or_wrong_is_named_with_what_to_send(server):
    for path, sent, told in WRONG:
        assert message(await server.client.post(path, **sent)) == told
    for fields, told in WRONG_SESSIONS:
        said = await by_websocket(server, **fields) or ""
        assert told in said and not any(sign in said for sign in PYTHON), said


async def test_so_it_is_in_a_query_and_in_a_change(server):
    answer = await server.client.get(VOICES, params={"limit": 0})
    assert message(answer) == (
        "Invalid limit: '0' was sent, and it should be greater than or equal to 1."
    )
    assert answer.json()["error"]["param"] == "query.limit"
    answer = await server.client.patch(f"{VOICES}/Ann", json={"expires_at": []})
    assert message(answer) == (
        "Invalid expires_at: a list was sent, and it should be a valid string or it "
        "should be a valid number."
    )
    answer = await server.client.patch(f"{VOICES}/Ann", json={"txt": "Hi."})
    assert message(answer) == (
        "Invalid txt: there is no such field here. Leave it out, or correct its name."
    )


BASE64 = data_url().partition(",")[2]


async def test_a_reference_that_is_no_url_is_told_what_it_lacks(server):
    no_urls = [BASE64, BASE64[:400], f" {data_url()}", "clip.wav", "ftp://a/b", ""]
    for no_url in no_urls:
        fields = {"ref_audio": no_url, "ref_text": "words"}
        answer = await server.client.post(SPEECH, json={"input": "Hi.", **fields})
        shown = no_url[:64]
        for told in (message(answer), await by_websocket(server, **fields) or ""):
            assert f"Invalid ref_audio: {shown!r}" in told and len(told) < 400
            assert "needs data:audio/wav;base64, before it" in told
        if len(no_url) < 8192:  # else it is refused before it is read
            told = await in_a_batch(server, **fields)
            assert f"Invalid ref_audio: {shown!r}" in told


def field_of(name, value, more=""):
    head = f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


async def test_a_file_without_a_name_is_to_be_sent_as_one(server):
    data = {"name": b"Ann", "consent": b"yes", "language": b"de"}
    fields = b"".join(field_of(name, value) for name, value in data.items())
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    for (path, field), named, num_bytes in itertools.product(
        FORMS.items(), ["", "; filename*=UTF-8''clip.wav"], [1000, 2 * 1024**2]
    ):
        clip = (wav(seconds=3.0) * 20)[:num_bytes]
        body = fields + field_of(field, clip, named) + b"--b--\r\n"
        answer = await server.client.post(path, content=body, headers=kind)
        told = message(answer)
        assert "as a file: its part of the form needs a filename" in told
        assert (f"Invalid {field}: it is no file." in told) == (num_bytes == 1000)
        assert "RIFF" not in answer.text and len(answer.content) < 500


async def test_no_refusal_repeats_what_was_sent(server):
    """Whatever our routes are sent that is wrong, in each field that they document."""
    await server.register("Ann", wav())
    app = FastAPI()
    for router in routers():
        app.include_router(router)
    document = app.openapi()
    num_told = 0
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            where = path.replace("{name}", "Ann").replace("{consent_id}", JUNK[:500])
            for sent in wrongly(document, operation):
                answer = await server.client.request(method.upper(), where, **sent)
                assert answer.status_code < 500, (path, answer.text)
                if answer.status_code < 400 or method == "head":
                    continue
                told = answer.json()["error"]["message"]
                assert JUNK[:300] not in told, (path, told)
                assert not any(sign in told for sign in PYTHON), (path, told)
                num_told += 1
    assert num_told > 200


def wrongly(document, operation):
    """Requests in which a field is wrong, one at a time."""
    yield {}
    wrong = [JUNK, [JUNK], {JUNK[:1000]: JUNK}, {"id": JUNK}, 10**400, None]
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "query":
            yield {"params": {parameter["name"]: JUNK[:500]}}
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        schema = body["schema"]
        named = next(
            each for each in (schema, *schema.get("anyOf", [])) if "$ref" in each
        )["$ref"]
        model = document["components"]["schemas"][named.rsplit("/", 1)[-1]]
        for field in [*model["properties"], JUNK[:500]]:
            if kind == "multipart/form-data":
                yield {"data": {field: JUNK}, "files": {"none": b""}}
                yield {"data": {"name": "Bea"}, "files": {field: JUNK.encode()}}
                continue
            for value in wrong:
                text = json.dumps({"input": "Hi.", field: value})
                content = {"Content-Type": "application/json"}
                yield {"content": text, "headers": content}
