"""A page of another site does nothing with a server that wants no key."""

import dataclasses
from argparse import Namespace
from itertools import product

import pytest
from fastapi.routing import APIRoute
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin

from tests.speaking import wav
from tests.speech_server import listening
from tests.two_tenants import two_tenants
from vllm_tts_cache.entrypoints.attach import routers

VOICES = "/v1/audio/voices"
STREAM = "/v1/audio/speech/stream"
APP, KEY = "https://app.example", "key-0123456789abcdef"
READING = {"GET", "HEAD"}


def of_page(origin=APP, site="cross-site", **headers):
    """What a browser sends with a page's request."""
    return {"Origin": origin, "Sec-Fetch-Site": site, **headers}


def started_with(server, **options):
    """The host's own middleware, as `vllm serve` puts it in for these options."""
    args = Namespace(**dataclasses.asdict(FrontendArgs(**options)))
    init_entrypoints_middleware(args, server.app, ())
    server.app.state.args = args


async def register(server, headers):
    return await server.client.post(
        VOICES,
        data={"name": "Ann", "consent": "yes"},
        files={"audio_sample": ("c.wav", wav(), "audio/wav")},
        headers=headers,
    )


def changing():
    """Every operation of ours that does more than reading, as method and path."""
    for router in routers():
        for route in router.routes:
            assert isinstance(route, APIRoute)
            for method in route.methods - READING:
                yield method, route.path.format(name="A", consent_id="c", token="t")


def refusals(answer):
    return answer.status_code, "another site" in answer.text


async def test_it_changes_nothing_and_speaks_nothing(server):
    started_with(server)
    await server.register("Ann", wav())
    operations = sorted(changing())
    assert len(operations) == 14
    # Over plain HTTP a browser does not say that it is another site's.
    unmarked = {"Origin": "http://server.example"}
    pages = of_page(), of_page(site="same-site"), unmarked
    for (method, path), headers in product(operations, pages):
        answer = await server.client.request(method, path, headers=headers)
        assert refusals(answer) == (403, True), (method, path, answer.text)
        assert answer.json()["error"]["code"] == 403
    assert server.engine.prompts == []
    shown = await server.client.get(f"{VOICES}/Ann", headers=of_page())
    assert shown.status_code == 200


async def test_the_servers_own_page_and_other_clients_are_served(server):
    started_with(server)
    own = "http://server"
    marked = of_page(site="same-origin"), of_page(own, site="same-site")
    for headers in ({}, {"Origin": own}, *marked):
        assert (await register(server, headers)).status_code == 200


async def test_one_whose_origin_the_operator_names_is_served(server):
    started_with(server, allowed_origins=[APP])
    done = await register(server, of_page())
    assert done.status_code == 200, done.text
    assert done.headers["access-control-allow-origin"] == APP
    other = await register(server, of_page("https://other.example"))
    assert refusals(other) == (403, True)


async def test_one_that_has_the_servers_key_is_served(server):
    """As OpenAI's client in a browser, whatever site that is on."""
    started_with(server, api_key=[KEY], allowed_origins=["*"])  # 0.30's default
    bearer = of_page(Authorization=f"Bearer {KEY}")
    preflight = await server.client.options(
        "/v1/audio/speech",
        headers=of_page()
        | {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type",
        },
    )
    assert preflight.status_code == 200
    assert (await register(server, bearer)).status_code == 200
    said = {"input": "Hello.", "model": "m", "voice": "Ann"}
    spoken = await server.client.post("/v1/audio/speech", json=said, headers=bearer)
    assert spoken.status_code == 200
    assert spoken.headers["access-control-allow-origin"] == "*"
    assert (await register(server, of_page())).status_code == 401


async def test_one_with_a_key_is_served(default_checkpoint, tmp_path, monkeypatch):
    async with two_tenants(default_checkpoint, tmp_path, monkeypatch) as host:
        started_with(host.server)
        host.us.client.headers.update(of_page())
        done = await host.us.register("Ann", host.us.clip())
        assert done.status_code == 200, done.text


async def test_it_opens_no_websocket(server):
    started_with(server, allowed_origins=[APP])
    async with listening(server.app) as port:
        url = f"ws://127.0.0.1:{port}{STREAM}"
        # Not every browser says whose site it is where a WebSocket is opened.
        for site in ({"Sec-Fetch-Site": "cross-site"}, {}):
            with pytest.raises(InvalidStatus) as refused:
                await connect(
                    url, origin=Origin("https://o.example"), additional_headers=site
                )
            assert refused.value.response.status_code == 403
            assert b"another site" in refused.value.response.body
            async with connect(url, origin=Origin(APP), additional_headers=site):
                pass
        for own in (None, Origin(f"http://127.0.0.1:{port}")):
            async with connect(url, origin=own):
                pass
