"""A library moves from one real server to another by the command line."""

import json
import signal
from contextlib import asynccontextmanager

import pytest

from tests import store_samples
from tests.catalogues import bucket_of
from tests.cli_runs import begun, ended, run
from tests.contract.test_cli_voices import Served, clip_bytes, serving
from tests.speaking import wav
from tests.waiting import soon
from vllm_tts_cache.catalogue import schema

VOICES, CONSENTS = "/v1/audio/voices", "/v1/audio/voice_consents"
YEAR = 365 * 86_400


@pytest.fixture
def kinds(default_checkpoint, tmp_path, monkeypatch, postgres):
    """Starts a server that keeps its voices in a directory, or one of a fleet."""
    monkeypatch.setenv("SPEAKER_BUNDLE_KEY", "a secret of both servers")

    @asynccontextmanager
    async def start(name, *, is_fleet=False):
        where = tmp_path / name
        with monkeypatch.context() as there:
            if is_fleet:
                # Of the API process, and of its workers.
                there.setenv("SPEAKER_CATALOGUE_URL", postgres.url_of(where))
                there.setenv("SPEAKER_STORE_URL", bucket_of(where))
                there.setattr(store_samples, "catalogue_url_of", postgres.url_of)
                there.setattr(store_samples, "store_url_of", bucket_of)
            made = serving(Served(default_checkpoint, where, there))
            server = await made.__aenter__()
        try:
            yield server
            assert server.service.store.verify() == []
        finally:
            await made.__aexit__(None, None, None)

    yield start
    postgres.tidy()


async def filled(server):
    """Voices with all that one can have, registered a year ago."""
    recording = {"recording": ("c.wav", wav(), "audio/wav")}
    form = {"name": "Ann's", "language": "de"}
    kept = await server.client.post(CONSENTS, data=form, files=recording)
    everything = {
        "consent": kept.json()["id"],
        "ref_text": "Größe.",
        "speaker_description": "warm",
        "language": "de",
        "labels": '{"team": "news", "sex": "f"}',
        "expires_at": "2100-01-01T00:00:00Z",
    }
    for number, fields in enumerate((everything, {"ref_text": "Two."}, {}, everything)):
        answer = await server.register(f"voice {number}", clip_bytes(number), **fields)
        assert answer.status_code == 200, answer.text
    answer = await server.embed("numbers", 0.25)
    assert answer.status_code == 200, answer.text
    changed = await server.client.patch(f"{VOICES}/voice 1", json={"language": "en"})
    assert changed.status_code == 200, changed.text
    with server.service.store.database.write() as db:
        for table in (schema.speaker, schema.consent):
            db.execute(table.update().values(created_at=table.c.created_at - YEAR))
    await run("voices", "warm", "--all", url=server.url)
    assert sum(server.encodes.values()) > 0


async def told(server):
    """All that clients are told of its voices and recordings."""
    listed = (await server.client.get(VOICES)).json()["uploaded_voices"]
    found = []
    for voice in listed:
        shown = (await server.client.get(f"{VOICES}/{voice['id']}")).json()
        audio = await server.client.get(f"{VOICES}/{voice['id']}/audio")
        # A number among the registrations of one server.
        generation = shown["voice"].pop("generation")
        assert generation > 0
        found.append((shown["voice"], audio.content))
    return found, (await server.client.get(CONSENTS)).json()


async def test_there_and_back_all_is_the_same_and_nothing_is_encoded(kinds, tmp_path):
    export = ["voices", "export", "--all", "--out"]
    async with kinds("old") as old, kinds("fleet", is_fleet=True) as fleet:
        await filled(old)
        saved = await run(*export, tmp_path / "there", url=old.url)
        assert (saved.status, saved.out) == (0, "5 exported\n"), saved.err
        done = await run("voices", "import", tmp_path / "there", url=fleet.url)
        assert (done.status, done.err) == (0, ""), done.out
        line = "verified: 5 of 5 voices are there as in their files, 5 with their ids"
        assert done.out.splitlines()[-2:] == [line, "5 imported"]
        before = await told(old)
        assert await told(fleet) == before
        for voice in ("voice 0", before[0][1][0]["id"]):
            spoken = await fleet.speak(voice=voice)
            assert spoken.status_code == 200, spoken.text
            assert spoken.headers["X-Speaker-Cache"] == "hit"
        assert (await fleet.speak(voice="numbers")).status_code == 200
        assert sum(fleet.encodes.values()) == 0
        saved = await run(*export, tmp_path / "back", url=fleet.url)
    # Into a stopped server's directory, without the variables of the fleet.
    store_samples.opened(tmp_path / "again").close()
    where = ["--directory", tmp_path / "again"]
    done = await run("voices", "import", tmp_path / "back", *where, "--json")
    assert (done.status, done.json["counts"]) == (0, {"imported": 5}), done.err
    async with kinds("again") as again:
        assert await told(again) == before
        assert (await run("voices", "warm", "--all", url=again.url)).status == 0
        assert sum(again.encodes.values()) == 0


async def test_interrupted_and_run_again_it_adds_no_voice_twice(kinds, tmp_path):
    folder = tmp_path / "files"
    async with kinds("old") as old, kinds("new") as new:
        for number in range(24):
            await old.register(f"voice {number:02}", clip_bytes(number))
        await run("voices", "export", "--all", "--out", folder, url=old.url)
        new.gate.is_open.clear()
        command = ["voices", "import", folder, "--json"]
        process = await begun(*command, url=new.url)
        await soon(lambda: new.gate.num_posts or process.returncode is not None, 120)
        new.gate.is_open.set()
        await soon(new.service.store.num_speakers, 60)
        process.send_signal(signal.SIGINT)
        cut = await ended(process)
        assert cut.status == 130, cut.err
        document = json.loads(cut.out)
        assert document["verified"] is None
        assert document["counts"]["not_tried"] > 0
        assert "to go on" in cut.err
        done = await run(*command, url=new.url)
        assert done.status == 0, done.err
        assert sum(done.json["counts"].values()) == 24
        assert done.json["counts"]["unchanged"] > 0
        assert done.json["verified"]["with_their_ids"] == 24
        assert await told(new) == await told(old)
