"""The host's own routes: what they are asked ends no engine, and disturbs no stream."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from tests.beside_a_stream import undisturbed
from tests.served import Servers
from vllm_tts_cache.testing.server import SpeechClient

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.every_family]

ROOT = Path(__file__).parents[2]
HALF = "\ud83d"
ADMIN_KEY = "admin-key-0123456789"
MODEL = "tts"
IDS = [1] * 20
PROMPTS = ["Hello.", HALF, "", "\0", "<|im_end|>", "x" * 300]
PROMPTS += [IDS, [0], [10**6] * 8, [-1] * 8, [2**70], [3071] * 4]
NO_REQUESTS = [None, [], "x", HALF, {}, 5, {"model": HALF}, {HALF: 1}, {"model": MODEL}]
OPTIONS = [
    {"n": 2},
    {"echo": True},
    {"stream": True},
    {"stream": True, "n": 2},
    {"temperature": 1e308},
    {"seed": 2**70},
    {"seed": -(2**63)},
    {"logit_bias": {"3071": 100}},
    {"stop": [HALF]},
    {"vllm_xargs": {"a": HALF}},
    {"vllm_xargs": {"a": 2**80}},
    {"vllm_xargs": {"tts_local_seed": "x"}, "seed": 5},
    {"kv_transfer_params": {"do_remote_decode": "x"}},
    {"cache_salt": HALF},
    {"priority": 5},
    {"max_tokens": 2**70},
    {"truncate_prompt_tokens": 2},
    {"prompt_embeds": "AAAA"},
    {"request_id": "x/" + "y" * 300},
    {"modalities": ["text"]},
    {"speaker": "nobody"},
    {"language": HALF},
    {"instructions": "calm"},
    {"sampling_params_list": [{"max_tokens": -5}]},
    {"sampling_params_list": [{"seed": "x"}]},
    {"sampling_params_list": [{"seed": 2**63}]},
    {"return_token_ids": True},
    {"data_parallel_rank": 7},
]
# What a talker believes its adapter of, said by a client; test_host_surface.py has all.
TOLD = [
    {"text": ["Hello"], "task_type": ["Base"]},
    {"tts_cache_speaker": ["a" * 64, "registered"]},
    {"voice_clone_prompt": 5, "text": ["x"], "task_type": ["Base"]},
]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
# Commands of an operator, which do what they say: only what is no command is sent.
COMMANDS = {"/v1/omni/sleep", "/v1/omni/wakeup", "/scale_elastic_ep"}
MESSAGES = ['{"type": "session.config"}', "{", HALF.encode("utf-8", "replace"), b"\0"]
MESSAGES += ['{"type": "session.update", "session": {"model": 5}}', "[]", "5", '""']
OURS = re.compile(r"/v1/(audio/|open_webui|vapi/)|/open-webui/|/voices|/health")


def routes_of(server):
    """Methods and paths that the server says it has, and its WebSockets' paths."""
    log = server.options.log_path.read_text()
    lines = re.findall(r"Route: (\S+), (Methods|Endpoint): (.+)", log)
    http = {
        (method.strip(), path)
        for path, kind, names in lines
        if kind == "Methods"
        for method in names.split(",")
    }
    return http, {path for path, kind, _ in lines if kind == "Endpoint"}


def body_for(path, prompt):
    messages = [{"role": "user", "content": prompt}]
    body = {"model": MODEL, "max_tokens": 16}
    if "chat" in path or "messages" in path:
        nested = [messages] if path.endswith("batch") else messages
        return {**body, "messages": nested, "chat_template": TEMPLATE}
    if path == "/detokenize":
        return {"model": MODEL, "tokens": prompt}
    if path == "/generative_scoring":
        return {**body, "query": prompt, "items": [prompt], "label_token_ids": [1, 2]}
    if "/sessions" in path:
        return {**body, "session_id": prompt}
    return {**body, "prompt": prompt, "input": prompt}


def bodies_for(path):
    yield from NO_REQUESTS
    if path in COMMANDS:
        return
    for prompt in PROMPTS:
        yield body_for(path, prompt)
    if path in ("/v1/completions", "/v1/chat/completions"):
        plain = body_for(path, IDS if path == "/v1/completions" else "Hello.")
        for option in OPTIONS:
            yield {**plain, **option}
        for told in TOLD:
            spoken = {"modalities": ["audio"], "additional_information": told}
            yield {**plain, **spoken}


def requests_to(http):
    """Each route with each body, and the methods that have none."""
    for method, path in sorted(http):
        where = re.sub(r"\{[^}]*\}", "nobody", path)
        if OURS.match(path) and path != "/v1/audio/generate":
            continue  # see test_hostile_speech.py, and the faults of our own routes
        bodies = bodies_for(path) if method in ("POST", "PATCH", "PUT") else [None]
        for body in bodies:
            yield method, path, where, body


def undocumented(path, status):
    return status >= 500 and f"`{path}` {status}" not in _documented()


def _documented():
    text = (ROOT / "docs/http-api.md").read_text()
    rows = re.findall(r"^\| (`/\S+`) \| ([0-9, ]+) \|", text, re.M)
    return {f"{path} {s.strip()}" for path, all_ in rows for s in all_.split(",")}


def ask(server, http, headers=None):
    """Ask all of them, some at once; return the statuses of each route."""
    statuses, texts = {}, {}

    def send(request):
        method, path, where, body = request
        content = None if method == "GET" else json.dumps(body).encode()
        said = {"Content-Type": "application/json", "Connection": "close"}
        answer = client.request(method, where, content=content, headers=said)
        statuses.setdefault((method, path), set()).add(answer.status_code)
        texts.setdefault((path, answer.status_code), (answer.text[:300], body))

    # One client for all: to make one takes longer than most answers.
    with (
        httpx.Client(base_url=server.url, timeout=300, headers=headers) as client,
        ThreadPoolExecutor(4) as several,
    ):
        list(several.map(send, requests_to(http)))
    return statuses, texts


def unexpected(server, http):
    """Ask all of them; return what is answered and documented nowhere."""
    statuses, texts = ask(server, http)
    return "\n".join(
        f"{path} {status}: {texts[path, status]}"
        for (_, path), all_ in statuses.items()
        for status in all_
        if undocumented(path, status)
    )


def post(client, path, body):
    headers = {"Content-Type": "application/json"}
    return client.http.post(path, content=json.dumps(body).encode(), headers=headers)


def talk(server, path, headers=None):
    """Say what no session says to a WebSocket, and leave whenever it closes."""
    url = server.url.replace("http", "ws") + path
    for message in MESSAGES:
        try:
            with connect(url, open_timeout=20, additional_headers=headers) as socket:
                socket.send(message)
                socket.send(message)
                socket.recv(timeout=0.5)
        except (WebSocketException, TimeoutError, OSError):
            pass


@pytest.mark.long  # test_host_surface.py has in process which of them there are
def test_no_route_of_the_host_ends_the_engine(family, keeper, shared_server):
    http, sockets = routes_of(shared_server)
    assert ("POST", "/v1/chat/completions") in http and "/v1/realtime" in sockets
    with undisturbed(shared_server.url, "keeper"):
        found = unexpected(shared_server, http)
        with ThreadPoolExecutor(len(sockets)) as several:
            list(several.map(lambda path: talk(shared_server, path), sockets))
    assert not found
    if not family.pipelines:  # of a diffusion model chat puts together no such prompt
        half = {**body_for("/v1/chat/completions", "Hello."), "language": HALF}
        told = post(keeper, "/v1/chat/completions", half)
        assert told.status_code == 400
        assert "cannot be sent to the engine" in told.text
    assert keeper.speak("Well?", voice="keeper").status == 200


@pytest.fixture(scope="session")
def tenants_server(family, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    path = folder / "tenants.json"
    tenants = [{"name": name, "keys": [f"{name}-key-0123456789"]} for name in "ab"]
    path.write_text(json.dumps({"tenants": tenants, "admin_keys": [ADMIN_KEY]}))
    path.chmod(0o600)
    own = Servers(family, checkpoint, folder)
    server, client = own.start(SPEAKER_TENANTS_FILE=path)
    yield server
    client.close()
    own.stop()


def open_paths():
    """Those that the page on tenants names."""
    text = (ROOT / "docs/tenants.md").read_text()
    [listed] = re.findall(r"<!-- open paths -->(.*?)<!-- end -->", text, re.S)
    return set(re.findall(r"`(/[^`]*)`", listed))


@pytest.mark.long  # a server of its own; test_host_surface.py has the same in process
def test_with_tenants_few_routes_are_there(tenants_server, shared_server, make_clip):
    without, sockets = routes_of(shared_server)
    http, left = routes_of(tenants_server)
    assert {path for _, path in http if not OURS.match(path)} | left == open_paths()
    key = {"Authorization": "Bearer a-key-0123456789"}
    client = SpeechClient(tenants_server.url)
    client.http.headers.update(key)
    client.register("keeper", make_clip(), ref_text="Hello there.").raise_for_status()
    client.precompute("keeper").raise_for_status()
    with undisturbed(tenants_server.url, "keeper", key):
        for headers in ({}, key):
            statuses, texts = ask(tenants_server, without, headers)
            for (method, path), all_ in statuses.items():
                if path in open_paths() or OURS.match(path):
                    assert max(all_) < 500, (method, path, texts)
                else:
                    assert all_ == {404}, (method, path, all_)
            for path in sockets:
                talk(tenants_server, path, headers)
    asleep = client.http.post("/v1/omni/sleep", json={"stage_ids": [0], "level": 1})
    assert asleep.status_code == 404
    assert client.speak("Well?", voice="keeper").status == 200
    client.close()


@pytest.mark.long
def test_tenants_speak_with_their_own(tenants_server, make_clip):
    def client_of(key):
        client = SpeechClient(tenants_server.url)
        client.http.headers["Authorization"] = f"Bearer {key}"
        return client

    a, b, admin = map(client_of, ("a-key-0123456789", "b-key-0123456789", ADMIN_KEY))
    for client in (a, b):
        client.register("Ann", make_clip(), ref_text="Hello.").raise_for_status()
    heard = [client.speak(voice="Ann") for client in (a, b)]
    assert [(each.status, each.cache) for each in heard] == [(200, "miss")] * 2
    assert heard[0].audio != heard[1].audio
    a.http.delete("/v1/audio/voices/Ann").raise_for_status()
    again = b.speak(voice="Ann")
    assert (again.cache, again.audio) == ("hit", heard[1].audio)
    assert admin.stats()["tenants"]["b"]["registry"]["speakers"] == 1
    for client in (a, b, admin):
        client.close()
