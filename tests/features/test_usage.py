"""How much each voice spoke, by day."""

import asyncio
from contextlib import contextmanager
from datetime import date, timedelta
from itertools import product

import pytest

from tests import store_samples
from tests.cli_runs import run
from tests.contract.test_cli_voices import clip_bytes
from tests.speaking import WAYS, by_websocket, data_url, refusal, registered, wav
from tests.two_tenants import ADMIN_KEY
from vllm_tts_cache.catalogue import voice_usage
from vllm_tts_cache.catalogue.voice_usage import Counts, Key
from vllm_tts_cache.entrypoints.serving import request_speaker
from vllm_tts_cache.errors import StorageError

USAGE = "/v1/audio/usage"
DAY = date(2026, 11, 28)


@pytest.mark.every_backend
def test_counts_are_added_and_shown_a_page_at_a_time(open_here):
    store = open_here()
    ann = store_samples.register(store, "Ann", 0, tenant="acme").record.speaker_id
    days = [(DAY - timedelta(days=n)).isoformat() for n in range(3)]
    keys = [Key(*each) for each in product(days, ("acme", "zenith"), (ann, "x"))]
    with store.database.write() as db:
        for batch in "aabb":  # inserted, then added to; a batch is added once
            voice_usage.add(db, "w", batch, dict.fromkeys(keys, Counts(1, 10, 0.5)))

    def shown(tenant, days, limit=99, after=None):
        with store.database.read() as db:
            first = DAY - timedelta(days=days)
            return voice_usage.between(db, tenant, first, DAY, limit, after)

    rows, totals = shown("acme", 1)
    assert totals == {"requests": 8, "characters": 80, "seconds": 4.0}
    assert [row["day"] for row in rows] == ["2026-11-28"] * 2 + ["2026-11-27"] * 2
    assert {row["name"] for row in rows} == {"Ann", None}
    assert {row["name"] for row in shown("zenith", 1)[0]} == {None}
    found, after = [], None
    while page := shown(None, 2, 5, after)[0]:
        found += page
        after = Key(*(page[-1][name] for name in Key._fields))
    assert {(row["day"], row["tenant"], row["speaker_id"]) for row in found} == {*keys}
    assert len(found) == len(keys)
    with store.database.write() as db:
        voice_usage.delete_before(db, DAY)
    assert len(shown(None, 99)[0]) == 4


async def test_each_way_to_speak_is_counted_once(server):
    await registered(server)
    await server.client.patch("/v1/audio/voices/Ann", json={"aliases": ["alloy"]})
    for speak in WAYS:
        assert await refusal(speak, server, voice="alloy") is None
    await server.speak(ref_audio=data_url(pitch_hz=210.0), ref_text="words")
    await server.speak(voice="nobody")
    answer = (await server.client.get(USAGE)).json()
    (row,) = answer["data"]
    assert (row["name"], row["requests"]) == ("Ann", len(WAYS))
    assert answer["totals"] == {name: row[name] for name in Counts._fields}
    # "Hello." or, of a batch, "Hi."; and 0.1 s of a whole answer, 0.2 s of a stream.
    assert 3 * len(WAYS) < row["characters"] <= 6 * len(WAYS)
    assert 0.1 * len(WAYS) <= row["seconds"] <= 0.2 * len(WAYS) + 0.01
    await server.client.delete("/v1/audio/voices/Ann")
    (row,) = (await server.client.get(USAGE)).json()["data"]
    assert row["name"] is None and row["requests"] == len(WAYS)


async def test_what_was_not_written_is_written_at_the_end(server):
    await registered(server)
    await server.speak(voice="Ann")
    server.handler.tally.shutdown()
    with server.service.store.database.read() as db:
        rows, _ = voice_usage.between(db, None, date.min, date.max, 9, None)
    assert [row["requests"] for row in rows] == [1]


WRONG = "since=2026-11-28&until=2026-11-27 since=2020-01-01 limit=0 since=x after=zzz"
WRONG += " after=2026-11-28/a/%00 after=x/y/z"


@pytest.mark.parametrize("query", WRONG.split())
async def test_days_that_cannot_be_are_a_400(server, query):
    assert (await server.client.get(f"{USAGE}?{query}")).status_code == 400


async def test_sockets_beside_one_another_are_counted_apart(server):
    for name, pitch_hz in (("Ann", 120.0), ("Bob", 210.0)):
        await registered(server, name, pitch_hz=pitch_hz)
    # Servers accept connections in the context in which the host has warmed up.
    request_speaker.SPEAKING.set(request_speaker.Speaking())
    said = (by_websocket(server, voice=name) for name in ("Ann", "Bob"))
    assert await asyncio.gather(*said) == [None, None]
    rows = (await server.client.get(USAGE)).json()["data"]
    assert {row["name"]: row["requests"] for row in rows} == {"Ann": 1, "Bob": 1}
    assert rows[0]["seconds"] == rows[1]["seconds"]


@pytest.mark.parametrize("is_committed", [False, True])
async def test_counts_stay_and_are_written_once(server, monkeypatch, is_committed):
    await registered(server)
    await server.speak(voice="Ann")
    database = server.service.store.database
    write = database.write

    @contextmanager
    def cut_off():
        if is_committed:
            with write() as db:
                yield db
        raise StorageError("no")

    with monkeypatch.context() as broken:
        broken.setattr(database, "write", cut_off)
        for _ in range(2):
            rows = (await server.client.get(USAGE)).json()["data"]
            assert len(rows) == is_committed
        await server.speak(voice="Ann")
    assert (await server.client.get(USAGE)).json()["totals"]["requests"] == 2


async def test_pages_end(server):
    tally = server.handler.tally
    records = [(await server.register(name, wav())).json()["voice"] for name in "abc"]
    for each in records:
        record = server.service.store.find(each["id"]).record
        tally.add(record, Counts(1, 1, 1.0))
    assert (await server.client.get(f"{USAGE}?until=0001-01-01")).json()["data"] == []
    seen, after, page = [], "", {}
    while after is not None:
        query = {"limit": 2, "after": after}
        page = (await server.client.get(USAGE, params=query)).json()
        seen += [row["name"] for row in page["data"]]
        after = page.get("next")
    assert sorted(seen) == ["a", "b", "c"] and len(page["data"]) == 1
    whole = (await server.client.get(f"{USAGE}?limit=3")).json()
    assert "next" not in whole and whole["totals"]["requests"] == 3


async def test_a_tenant_sees_its_own(host):
    for side in (host.us, host.them):
        await side.register("Ann", side.clip())
        assert (await side.speak(voice="Ann")).status_code == 200
    for side in (host.us, host.them):
        (row,) = (await side.client.get(USAGE)).json()["data"]
        assert row["requests"] == 1 and "tenant" not in row
    async with host.client(ADMIN_KEY) as admin:
        rows = (await admin.get(USAGE)).json()["data"]
    assert {row["tenant"] for row in rows} == {"acme", "zenith"}
    assert (await host.anyone.get(USAGE)).status_code == 401


async def test_the_command_line_shows_it(served):
    usage = "voices", "usage"
    assert "no voice spoke" in (await run(*usage, url=served.url)).err
    await served.register("Ann", clip_bytes())
    assert (await served.speak(voice="Ann")).status_code == 200
    done = await run(*usage, url=served.url)
    assert done.status == 0 and "Ann" in done.out and "total" in done.out
    done = await run(*usage, "--json", url=served.url)
    assert done.json["totals"]["requests"] == 1
