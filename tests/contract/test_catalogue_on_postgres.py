"""A server whose catalogue is on PostgreSQL: what its clients and operators see."""

import asyncio
import json
import logging
import signal

import pytest

from tests import store_samples
from tests.cli_runs import run
from tests.speaking import data_url, wav
from tests.waiting import soon
from vllm_tts_cache.catalogue import leases
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.entrypoints.speakers import deletions

VOICES = "/v1/audio/voices"


@pytest.fixture
def url(postgres, tmp_path, monkeypatch):
    monkeypatch.setattr(store_samples, "catalogue_url_of", postgres.url_of)
    url = postgres.url_of(tmp_path / "speakers")
    monkeypatch.setenv("SPEAKER_CATALOGUE_URL", url)
    yield url
    postgres.tidy()


@pytest.fixture
def server(url, server):
    return server


async def test_a_warm_request_asks_the_database_once(server, monkeypatch):
    await server.register("Ann", wav())
    await server.speak(voice="Ann")
    asked = []
    first = Database.first_at_once

    def counted(self, statement, where):
        # How a lease stands, four times a second, is of no request.
        if statement is not leases._STANDING:
            asked.append(statement)
        return first(self, statement, where)

    monkeypatch.setattr(Database, "first_at_once", counted)
    await server.speak(voice="Ann")
    assert len(asked) == 1


async def test_while_it_is_down_a_503_says_so(server, postgres, plugin_log):
    await asyncio.gather(*(server.register(name, wav()) for name in ("Ann", "Cid")))
    assert (await server.speak(voice="Ann")).status_code == 200
    postgres.stop()
    try:
        answers = await asyncio.gather(
            server.speak(voice="Cid"),  # whose row was not read
            server.speak(ref_audio=data_url(), ref_text="Hello."),
            server.client.get(f"{VOICES}/Ann"),
            server.client.get(VOICES),
            server.register("Bob", wav()),
            server.client.delete(f"{VOICES}/Ann"),
        )
        for answer in answers:
            assert answer.status_code == 503, answer.text
            assert answer.headers["Retry-After"] == "2"
            assert "The voice catalogue is down" in answer.text
            assert str(postgres.directory) not in answer.text
    finally:
        postgres.start()

    async def speaks():
        return (await server.speak(voice="Ann")).status_code == 200

    until = asyncio.get_running_loop().time() + 10
    while not await speaks():
        assert asyncio.get_running_loop().time() < until
        await asyncio.sleep(0.1)
    await server.register("Bob", wav())
    assert "s3cret" not in plugin_log.text


async def test_an_outage_is_tidied_up_without_a_restart(server, postgres, monkeypatch):
    """It stayed where the outage was over before a round had looked."""
    monkeypatch.setattr(deletions, "RECOVERY_SECONDS", 0.5)
    monkeypatch.setattr(deletions, "RECOVERY_SPREAD_SECONDS", 0.5)
    monkeypatch.setattr(deletions, "ROUND_SECONDS", 5.0)
    store = server.service.store
    engine = store.database.backend.writing
    commit = engine.dialect.do_commit

    def placed():
        return list(store.files.store.rglob("*.safetensors"))

    def stop_before(connection):
        if placed() and postgres.process is not None:  # the server writes as well
            postgres.stop(signal.SIGQUIT)
        commit(connection)

    with monkeypatch.context() as patched:
        patched.setattr(engine.dialect, "do_commit", stop_before)
        assert (await server.register("Ann", wav())).status_code == 503
    assert len(placed()) == 1
    postgres.start()
    await soon(lambda: not placed())
    await soon(lambda: not store.files.leftovers())
    assert store.verify() == []


async def test_nobody_is_shown_the_password(server, url, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    await server.register("Ann", wav())
    shown = [
        (await server.client.get(path)).text
        for path in ("/v1/audio/speaker_cache", f"{VOICES}/Ann", VOICES)
    ]
    done = await run("doctor", "--quick", "--json")
    checks = {check["name"]: check for check in json.loads(done.out)["checks"]}
    catalogue = checks["catalogue"]
    assert catalogue["status"] in ("ok", "warn"), catalogue
    assert "postgresql://tests@" in catalogue["text"]
    assert "1 voices, 1 API servers" in catalogue["text"]
    assert not any("s3cret" in text for text in [*shown, done.out, caplog.text])


async def test_the_doctor_says_what_is_wrong(postgres, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(tmp_path))
    for url, status, text in (
        ("postgresql://me:s3cret@127.0.0.1:1/x", "fail", "refused"),
        (postgres.url("nowhere"), "fail", "does not exist"),
        (postgres.make("doctor"), "ok", "no server"),
    ):
        monkeypatch.setenv("SPEAKER_CATALOGUE_URL", url)
        done = await run("doctor", "--quick", "--json")
        checks = {check["name"]: check for check in json.loads(done.out)["checks"]}
        assert checks["catalogue"]["status"] == status
        assert text in checks["catalogue"]["text"]
        assert "s3cret" not in done.out
