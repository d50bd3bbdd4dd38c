"""Of the host's routes those stay open that the list has; its chat builds no prompt."""

import asyncio
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, WebSocket
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.speech_server import listening
from vllm_tts_cache.entrypoints.serving import host_fixes
from vllm_tts_cache.speaker.reference import with_keyed_salt
from vllm_tts_cache.tenants import ALONE, speaking_for

# Routes that vLLM-Omni 0.32 adds to 0.30's where it is configured to change weights.
WEIGHTS = "vllm_omni.entrypoints.serve.weight_transfer_api"


async def test_what_a_later_host_adds_is_404_and_ours_is_there(server):
    app, later = server.app, APIRouter()

    @later.post("/v1/omni/later")
    @later.delete("/v1/models")
    @later.get("/v1/audio/voices_of_everybody")
    async def of_a_later_host():
        return {}

    @later.websocket("/v1/later")
    async def socket_of_a_later_host(websocket: WebSocket):
        await websocket.accept()

    app.include_router(later)
    if find_spec(WEIGHTS):
        app.include_router(import_module(WEIGHTS).router)
    mounted = FastAPI()
    app.mount("/mounted", mounted)
    assert (await server.client.post("/v1/omni/later")).status_code == 200
    host_fixes.close_host_routes(app.router)
    for method, path in [
        ("POST", "/v1/omni/later"),
        ("GET", "/v1/audio/voices_of_everybody"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/omni/sleep"),
        ("GET", "/mounted/docs"),
        ("POST", "/update_weights"),
        ("DELETE", "/v1/models"),
    ]:
        answer = await server.client.request(method, path, json={})
        assert answer.status_code == (405 if method == "DELETE" else 404), path
    assert (await server.client.get("/v1/audio/voices")).status_code == 200
    assert (await server.client.get("/health")).status_code != 404
    assert (await server.client.get("/voices")).status_code == 200
    left = {getattr(route, "path", None) for route in app.router.routes}
    assert "/v1/later" not in left and "/v1/audio/speech/stream" in left
    assert left & {"/v1/models", "/openapi.json"} <= host_fixes.OPEN_PATHS
    documented = (await server.client.get("/openapi.json")).json()["paths"]
    assert "/v1/omni/sleep" not in documented and "/v1/audio/speech" in documented


HEAD = b"POST / HTTP/1.1\r\nHost: s\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "begun", [b"GET /", HEAD + b"X-A: ", CHUNKED + b"1;", CHUNKED + b"0\r\nX-A: "]
)
async def test_what_has_no_end_before_or_behind_a_body_is_refused(begun):
    """One header of 64 MB was read, and kept in memory: the parser bounds none."""

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass

    async with listening(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        await asyncio.sleep(0.1)
        writer.write(b"a" * (host_fixes.MAX_HEAD_BYTES + 1))
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"too long" in answer
        writer.close()


async def test_the_host_serves_so(server):
    served = {}

    async def serve_http(_, **options):
        served.update(options)

    await host_fixes.guarding(serve_http, has_tenants=False)(server.app, port=1)
    assert served == {"http": host_fixes.BoundedHeads, "port": 1}


HOLDER: Any = SimpleNamespace(secret=b"secret")


class Engine:
    """Takes what comes to it."""

    default_sampling_params_list = (SamplingParams(repetition_penalty=1.05),)

    def __init__(self):
        self.taken = []

    def generate(self, prompt, *_, **__):
        self.taken.append(prompt)


@pytest.fixture
def engine():
    engine = Engine()
    host_fixes.believe_adapters_alone(engine, HOLDER)
    return engine


@pytest.mark.parametrize(
    "told",
    [
        {"tts_cache_speaker": ["a" * 64, "registered"]},
        {"meta": 5},
        {"language": 5},
        {"speaker": [["x"]]},
        {"language": ["de"], "text": ["Hello."]},
        {5: 5},
    ],
    ids=str,
)
def test_what_a_client_told_a_talker_is_refused(engine, told):
    prompt = {"prompt_token_ids": [1], "additional_information": told}
    for given in (prompt, [{"prompt_token_ids": [1]}, prompt]):
        with pytest.raises(
            host_fixes.ForeignRequestError, match="POST /v1/audio/speech"
        ):
            engine.generate(given)
    assert not engine.taken
    with speaking_for(ALONE):
        engine.generate(prompt)
    assert engine.taken == [prompt]


def test_a_salt_of_an_adapter_is_keyed_and_a_clients_stays(engine):
    prompt = {"prompt_token_ids": [1], "cache_salt": "of a voice"}
    engine.generate(prompt)
    with speaking_for(ALONE):
        engine.generate(prompt)
        engine.generate({**prompt, "cache_salt": "of another"})
    clients, ours, others = [each["cache_salt"] for each in engine.taken]
    assert clients == "of a voice"
    assert len({clients, ours, others}) == 3
    assert with_keyed_salt(prompt, HOLDER.secret)["cache_salt"] == ours
    assert with_keyed_salt(prompt, b"another")["cache_salt"] != ours


def test_what_the_hosts_chat_says_of_its_own_fields_is_taken(engine):
    of_fields = {"language": ["de"], "speaker": ["vivian"], "instruction": "calm"}
    for prompt in ("Hello.", {"prompt_token_ids": [1]}, [1, 2]):
        engine.generate(prompt)
    engine.generate({"prompt_token_ids": [1], "additional_information": of_fields})
    assert len(engine.taken) == 4


@pytest.mark.parametrize(
    "extra_args",
    [
        {"kv_transfer_params": "x"},
        {"kv_transfer_params": {"a": 1}},
        {"kv_cache_report_mode": "x"},
        {"tts_local_seed": "x"},
        {"temperature": float("nan")},
    ],
    ids=str,
)
def test_what_scheduler_and_workers_read_is_checked_on_any_route(engine, extra_args):
    params = SamplingParams(extra_args=extra_args)
    with pytest.raises(host_fixes.ForeignRequestError, match="vllm_xargs"):
        engine.generate([1], params, "id")
    with pytest.raises(host_fixes.ForeignRequestError, match="vllm_xargs"):
        engine.generate([1], sampling_params_list=[SamplingParams(), params])
    engine.generate([1], SamplingParams(extra_args={"tts_local_seed": 7}), "id")
    assert engine.taken == [[1]]


FOR_TEXT = {"allowed_token_ids": [3_071], "bad_words": ["a"], "min_tokens": 3}
FOR_TEXT |= {"frequency_penalty": 0.1, "logit_bias": {10**5: 5.0}, "logprobs": 0}
FOR_TEXT |= {"presence_penalty": 0.1, "prompt_logprobs": 1, "repetition_penalty": 1.3}
GRAMMAR = StructuredOutputsParams(json_object=True)
FOR_TEXT |= {"structured_outputs": GRAMMAR, "stop_token_ids": [10**5]}


@pytest.mark.parametrize("name", FOR_TEXT)
def test_what_is_for_text_is_refused(engine, name):
    """It would change how a neighbour sounds, or end the engine."""
    params = SamplingParams(**{name: FOR_TEXT[name]})
    with pytest.raises(host_fixes.ForeignRequestError, match=f"{name}: .* leave it"):
        engine.generate([1], params, "id")
    engine.generate([1], SamplingParams(repetition_penalty=1.05, logit_bias={}), "id")
    assert engine.taken == [[1]]


WRONG = [{"seed": "x"}, {"seed": 1.5}, {"seed": 2**63}, {"ignore_eos": 5}]


@pytest.mark.parametrize("wrong", [*WRONG, {"logit_bias": []}], ids=str)
def test_what_the_engine_cannot_decode_is_refused(engine, wrong):
    """The host's chat makes them of what a client sends, and checks no type."""
    with pytest.raises(host_fixes.ForeignRequestError, match="sampling"):
        engine.generate([1], sampling_params_list=[SamplingParams(**wrong)])
    assert not engine.taken


@pytest.mark.parametrize("request_id", ["a/b", "x" * 201, "a\0b"])
def test_a_request_is_called_what_a_file_may_be_called(engine, request_id):
    with pytest.raises(host_fixes.ForeignRequestError, match="request_id"):
        engine.generate([1], None, request_id)
    engine.generate([1], None, "cmpl-1")
