"""Every route of voices, called by two tenants that have a voice of the same name."""

import json
from typing import Any

import pytest
from fastapi.routing import APIRoute
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.speaking import BY_SOCKET, wav
from tests.speech_server import listening
from tests.two_tenants import ADMIN_KEY, AUDIO, CONSENTS, STRANGER, VOICES, two_tenants
from vllm_tts_cache.catalogue.names import CONSENT_PREFIX, VOICE_PREFIX
from vllm_tts_cache.entrypoints.serving import host_speakers
from vllm_tts_cache.errors import NoTenantError
from vllm_tts_cache.store import bundle_format
from vllm_tts_cache.tenants import Tenant, speaking_for

STREAM = f"{AUDIO}/speech/stream"
NOBODY = f"{VOICE_PREFIX}{0:032}"
NO_CONSENT = f"{CONSENT_PREFIX}{0:032}"


@pytest.fixture
async def host(default_checkpoint, tmp_path, monkeypatch):
    async with two_tenants(default_checkpoint, tmp_path, monkeypatch) as host:
        for side in (host.us, host.them):
            answer = await side.register("Ann", side.clip(), ref_text=side.words)
            assert answer.status_code == 200, answer.text
            side.voice = answer.json()["voice"]
        yield host


async def add_consent(side, name="Ann's"):
    form = {"name": name, "language": "de"}
    file = {"recording": ("c.wav", side.clip(), "audio/wav")}
    return await side.client.post(CONSENTS, data=form, files=file)


async def alike(ask, theirs, nobody):
    """Of another tenant is as of nobody: status, text and headers."""
    found, none = await ask(theirs), await ask(nobody)
    assert found.status_code == none.status_code >= 400, found.text
    assert found.text.replace(theirs, nobody) == none.text
    volatile = {"date", "content-length"}
    assert {k: v for k, v in found.headers.items() if k not in volatile} == {
        k: v for k, v in none.headers.items() if k not in volatile
    }


# -------- a check for each route: what we see is ours, what is theirs is nobody's


async def registers(host):
    us, them = host.us, host.them
    answer = await us.register("Bea", us.clip(), description="x")
    assert answer.status_code == 200
    assert (await us.names(), await them.names()) == (["Ann", "Bea"], ["Ann"])
    # Over a name that the other one has as well.
    again = (await us.register("Ann", us.clip(seconds=2.0))).json()["voice"]
    assert again["id"] == us.voice["id"]
    shown = (await them.client.get(f"{VOICES}/Ann")).json()["voice"]
    assert shown == them.voice
    # Its consent names a recording of theirs.
    theirs = (await add_consent(them)).json()["id"]
    cid = (await us.register("Cid", us.clip(), consent=theirs)).json()["voice"]
    assert "consent_id" not in cid


async def lists(host):
    us, them = host.us, host.them
    for query in ({}, {"sort": "newest"}, {"search": "ann"}, {"limit": 1}):
        answer = (await us.client.get(VOICES, params=query)).json()
        assert answer["uploaded_voices"] == [us.voice], query
        assert set(answer["voices"]) == {"Ann"} or "search" in query
    names = (await us.client.get(VOICES, params={"names_only": True})).json()
    assert names["voices"] == ["Ann"]

    async def after(name):
        return await us.client.get(VOICES, params={"after": name, "sort": "oldest"})

    await alike(after, them.voice["id"], NOBODY)
    patch = {"labels": {"team": "secret"}, "speaker_description": "whispering"}
    await them.client.patch(f"{VOICES}/Ann", json=patch)
    for query in ({"label": "team:secret"}, {"search": "whisper"}):
        answer = (await us.client.get(VOICES, params=query)).json()
        assert (answer["uploaded_voices"], answer["voices"]) == ([], [])


def of_voice(method, rest="", **body):
    """A route of one voice: what is asked of the other tenant's is of nobody."""

    async def check(host):
        us, them = host.us, host.them

        async def ask(name):
            return await us.client.request(method, f"{VOICES}/{name}{rest}", **body)

        await alike(ask, them.voice["id"], NOBODY)
        for name in ("Ann", us.voice["id"]):
            assert (await ask(name)).status_code < 400

    return check


async def shows(host):
    await of_voice("GET")(host)
    for side in (host.us, host.them):
        shown = (await side.client.get(f"{VOICES}/Ann")).json()["voice"]
        assert shown == side.voice and "generation" not in shown


async def changes(host):
    us, them = host.us, host.them
    await of_voice("PATCH", json={"speaker_description": "mine"})(host)
    await them.register("Bea", them.clip())
    named = await us.client.patch(f"{VOICES}/Ann", json={"name": "Bea"})
    assert named.status_code == 200, named.text
    assert (await us.names(), await them.names()) == (["Bea"], ["Ann", "Bea"])
    theirs = (await them.client.get(f"{VOICES}/Ann")).json()["voice"]
    assert theirs == them.voice


async def deletes(host):
    us, them = host.us, host.them

    async def delete(name):
        return await us.client.delete(f"{VOICES}/{name}")

    await alike(delete, them.voice["id"], NOBODY)
    gone = await them.client.delete(f"{VOICES}/Ann")
    assert gone.json()["id"] == them.voice["id"]
    # How far another one's deletion is, is nobody's business either.
    await alike(delete, them.voice["id"], NOBODY)
    assert (await us.names(), await them.names()) == (["Ann"], [])
    assert (await us.speak(voice="Ann")).status_code == 200
    assert (await delete("Ann")).json()["id"] == us.voice["id"]
    assert (await delete("Ann")).status_code == 404


async def gives_audio(host):
    await of_voice("GET", "/audio")(host)
    await of_voice("HEAD", "/audio")(host)
    ours = await host.us.client.get(f"{VOICES}/Ann/audio")
    theirs = await host.them.client.get(f"{VOICES}/Ann/audio")
    assert ours.content != theirs.content


async def exports(host):
    await of_voice("GET", "/bundle")(host)
    for side in (host.us, host.them):
        data = (await side.client.get(f"{VOICES}/Ann/bundle")).content
        told = bundle_format.read(data, b"").voice
        assert told.audio_sha256 == side.voice["audio_sha256"]


async def imports(host):
    us, them = host.us, host.them
    await add_consent(them)
    bundle = (await them.client.get(f"{VOICES}/Ann/bundle")).content
    file = {"bundle": ("Ann.voice", bundle)}

    async def take(name, on_conflict="fail"):
        form = {"name": name, "on_conflict": on_conflict}
        return await us.client.post(f"{VOICES}/import", files=file, data=form)

    assert (await take("Ann")).status_code == 409
    await them.register("Bea", them.clip())
    taken = await take("Bea")
    assert taken.status_code == 200, taken.text
    renamed = (await take("Ann", "rename")).json()["imported"][0]["voice"]
    assert renamed["name"] == "Ann (2)"
    replaced = (await take("Ann", "replace")).json()["imported"][0]["voice"]
    assert replaced["id"] == us.voice["id"]
    assert (await them.names(), len(await us.names())) == (["Ann", "Bea"], 3)


async def precomputes(host):
    await of_voice("POST", "/cache")(host)
    theirs = (await host.them.client.get(f"{VOICES}/Ann/cache")).json()
    assert theirs["cache_status"] == "pending"


async def checks(host):
    file = {"audio_sample": ("c.wav", host.us.clip(), "audio/wav")}
    answer = await host.us.client.post(f"{VOICES}/check", files=file)
    assert answer.status_code == 200 and await host.us.names() == ["Ann"]


async def keeps_consents(host):
    mine = await add_consent(host.us)
    assert mine.status_code == 200, mine.text
    for side, number in ((host.us, 1), (host.them, 0)):
        assert len((await side.client.get(CONSENTS)).json()["data"]) == number


async def lists_consents(host):
    us, them = host.us, host.them
    mine, theirs = [(await add_consent(side)).json() for side in (us, them)]
    assert (await us.client.get(CONSENTS)).json()["data"] == [mine]

    async def after(consent_id):
        return await us.client.get(CONSENTS, params={"after": consent_id})

    await alike(after, theirs["id"], NO_CONSENT)


def of_consent(method, **body):
    async def check(host):
        us, them = host.us, host.them
        mine, theirs = [(await add_consent(side)).json() for side in (us, them)]

        async def ask(consent_id):
            return await us.client.request(method, f"{CONSENTS}/{consent_id}", **body)

        await alike(ask, theirs["id"], NO_CONSENT)
        assert (await ask(mine["id"])).status_code == 200
        assert (await them.client.get(CONSENTS)).json()["data"] == [theirs]

    return check


async def counts(host):
    us, them = host.us, host.them
    await them.register("Bea", them.clip())
    await add_consent(us)
    path = f"{AUDIO}/speaker_cache"
    answers = [(await side.client.get(path)).json() for side in (us, them)]
    mine, theirs = (answer["registry"] for answer in answers)
    assert (mine["speakers"], mine["consents"]) == (1, 1)
    assert (theirs["speakers"], theirs["consents"]) == (2, 0)
    assert set(answers[0]) == {"registry", "limits", "deletions"}
    admin = host.client(ADMIN_KEY)
    all_ = await admin.get(path)
    await admin.aclose()
    told = all_.json()
    assert told["tenants"] == {"acme": answers[0], "zenith": answers[1]}
    assert told["registry"] == {"speakers": 3} and len(told["workers"]) == 1
    assert "Ann" not in all_.text and us.voice["id"] not in all_.text


async def speaks(host):
    us, them = host.us, host.them
    for side in (us, them):
        for name in ("Ann", side.voice["id"]):
            for how in ({}, {"stream": True, "response_format": "pcm"}):
                spoken = await side.speak(voice=name, **how)
                assert spoken.status_code == 200, spoken.text
                assert host.spoken() == side.voice["audio_sha256"]

    async def ask(voice):
        return await us.speak(voice=voice)

    await alike(ask, them.voice["id"], NOBODY)


async def speaks_in_batches(host):
    us, them = host.us, host.them

    async def results(side, *voices):
        items = [{"input": "Hi.", "voice": voice} for voice in voices]
        body = {"items": items, "model": "m"}
        answer = await side.client.post(f"{AUDIO}/speech/batch", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["results"]

    for side in (us, them):
        (one,) = await results(side, "Ann")
        assert one["status"] == "success"
        assert host.spoken() == side.voice["audio_sha256"]
    ours, theirs, nobody = await results(us, "Ann", them.voice["id"], NOBODY)
    assert ours["status"] == "success"
    assert theirs["error"].replace(them.voice["id"], NOBODY) == nobody["error"]


async def speaks_by_websocket(host):
    us, them = host.us, host.them
    for speak in BY_SOCKET:
        for side in (us, them):
            assert await speak(host.server, key=side.key, voice="Ann") is None
            assert host.spoken() == side.voice["audio_sha256"]
        said = [
            await speak(host.server, key=us.key, voice=voice)
            for voice in (them.voice["id"], NOBODY)
        ]
        assert said[0] is not None
        assert said[0].replace(them.voice["id"], NOBODY) == said[1]


async def generates(host):
    """It names no voices; that it is not served here is the host's word."""
    answer = await host.us.client.post(f"{AUDIO}/generate", json={"input": "rain"})
    assert answer.status_code not in (401, 403)


async def counts_speech(host):
    for side in (host.us, host.them):
        await side.speak(voice="Ann")
        rows = (await side.client.get(f"{AUDIO}/usage")).json()["data"]
        assert [row["voice_id"] for row in rows] == [side.voice["id"]]


MATRIX = {
    ("POST", VOICES): registers,
    ("GET", VOICES): lists,
    ("GET", f"{VOICES}/{{name}}"): shows,
    ("PATCH", f"{VOICES}/{{name}}"): changes,
    ("DELETE", f"{VOICES}/{{name}}"): deletes,
    ("POST", f"{VOICES}/{{name}}/cache"): precomputes,
    ("GET", f"{VOICES}/{{name}}/cache"): of_voice("GET", "/cache"),
    ("GET", f"{VOICES}/{{name}}/audio"): gives_audio,
    ("HEAD", f"{VOICES}/{{name}}/audio"): gives_audio,
    ("GET", f"{VOICES}/{{name}}/bundle"): exports,
    ("POST", f"{VOICES}/import"): imports,
    ("POST", f"{VOICES}/check"): checks,
    ("POST", CONSENTS): keeps_consents,
    ("GET", CONSENTS): lists_consents,
    ("GET", f"{CONSENTS}/{{consent_id}}"): of_consent("GET"),
    ("POST", f"{CONSENTS}/{{consent_id}}"): of_consent("POST", json={"name": "x"}),
    ("DELETE", f"{CONSENTS}/{{consent_id}}"): of_consent("DELETE"),
    ("GET", f"{AUDIO}/speaker_cache"): counts,
    ("GET", f"{AUDIO}/usage"): counts_speech,
    ("POST", f"{AUDIO}/speech"): speaks,
    ("POST", f"{AUDIO}/speech/batch"): speaks_in_batches,
    ("WEBSOCKET", STREAM): speaks_by_websocket,
    ("POST", f"{AUDIO}/generate"): generates,
}


@pytest.mark.parametrize("route", MATRIX, ids=" ".join)
async def test_a_tenant_has_its_own_voices_and_no_others(host, route):
    await MATRIX[route](host)


NO_KEYS = ({}, {"Authorization": f"Bearer {STRANGER}"}, {"Authorization": "x"})


async def test_without_a_tenants_key_there_is_nothing(host):
    admin = host.client(ADMIN_KEY)
    for method, where in MATRIX:
        if method == "WEBSOCKET":
            continue  # below, over a real socket
        path = where.format(name="Ann", consent_id=NO_CONSENT)
        for header in NO_KEYS:
            # What it sends is not looked at, however much that were.
            sent = {**header, "Content-Length": "99999999999"}
            answer = await host.anyone.request(method, path, headers=sent)
            assert answer.status_code == 401, (method, path, answer.text)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            if method == "HEAD":
                continue  # which says no more
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("AuthenticationError", 401)
        if path not in (f"{AUDIO}/speaker_cache", f"{AUDIO}/usage"):
            # Forms and bodies that would be taken of a tenant.
            body: dict[str, Any] = {}
            if method in ("POST", "PATCH"):
                body = BODIES.get(path, {"json": {"name": "x"}})
            answer = await admin.request(method, path, **body)
            assert answer.status_code == 403, (method, path, answer.text)
    await admin.aclose()


CLIP = ("c.wav", wav(), "audio/wav")
BODIES: dict[str, dict[str, Any]] = {
    VOICES: {"data": {"name": "x", "consent": "y"}, "files": {"audio_sample": CLIP}},
    f"{VOICES}/import": {"files": {"bundle": CLIP}},
    f"{VOICES}/check": {"files": {"audio_sample": CLIP}},
    CONSENTS: {"data": {"name": "x", "language": "de"}, "files": {"recording": CLIP}},
    f"{AUDIO}/speech": {"json": {"input": "x", "model": "m"}},
    f"{AUDIO}/speech/batch": {"json": {"items": [{"input": "x"}], "model": "m"}},
    f"{AUDIO}/generate": {"json": {"input": "x"}},
}


async def test_every_route_is_in_the_matrix(host):
    """A route that comes later, of ours or of the host's, is tested here or fails."""
    found: set[tuple[str, str]] = set()
    for route in host.server.app.routes:
        path = getattr(route, "path", "")
        if path.startswith(AUDIO):
            methods = route.methods if isinstance(route, APIRoute) else {"WEBSOCKET"}
            found.update((method, path) for method in methods)
    assert found == set(MATRIX)


async def test_a_websocket_without_a_tenants_key_is_a_401_before_it_opens(host):
    async with listening(host.server.app) as port:
        url = f"ws://127.0.0.1:{port}{STREAM}"
        for key, status in ((None, 401), (STRANGER, 401), (ADMIN_KEY, 403)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            with pytest.raises(InvalidStatus) as refused:
                async with connect(url, additional_headers=headers):
                    pass
            response = refused.value.response
            assert response.status_code == status
            assert json.loads(response.body)["error"]["code"] == status
        headers = {"Authorization": f"Bearer {host.us.key}"}
        async with connect(url, additional_headers=headers) as socket:
            await socket.send(json.dumps({"type": "session.close"}))


async def test_the_host_finds_voices_of_the_tenant_that_it_works_for(host):
    """Adapters of models that we do not serve look voices up in the host's way."""
    speech = host.server.handler
    for side in (host.us, host.them):
        with speaking_for(Tenant(name=side.tenant)):
            voice = await speech._read_voice("Ann")
        with host_speakers.known({"ann": voice}):
            assert speech.uploaded_speakers["ann"]["ref_text"] == side.words
            assert list(speech.uploaded_speakers) == ["ann"]
            samples, _ = speech._load_uploaded_audio("Ann")
            assert len(samples) > 0
            assert speech._get_uploaded_speaker_embedding("Ann") is None
    voice = await speech._read_voice("Ann")
    for look in (
        lambda: speech.uploaded_speakers["ann"],
        lambda: "ann" in speech.uploaded_speakers,
        lambda: speech._get_uploaded_speaker_embedding("Ann"),
    ):
        with host_speakers.known({"ann": voice}), pytest.raises(NoTenantError):
            look()
