"""Many voices come as one stream, whatever happens to them and whoever leaves."""

import asyncio
import io
import threading

import httpx
import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes
from tests.contract.test_speech import wav
from tests.slow_readers import LARGE, loses_its_place
from tests.speech_server import Server, listening, running
from tests.waiting import soon
from vllm_tts_cache.entrypoints import archive_routes, sending
from vllm_tts_cache.entrypoints.service import MAX_ARCHIVES, MAX_BUNDLES
from vllm_tts_cache.errors import InvalidArchiveError, StorageUnavailableError
from vllm_tts_cache.store.archive_format import ArchiveReader
from vllm_tts_cache.store.bundle_format import read

ARCHIVE, VOICES = "/v1/audio/voice_archive", "/v1/audio/voices"


@pytest.fixture
async def server(default_checkpoint, tmp_path, monkeypatch):
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        yield server


async def register(server, *names, **fields):
    for number, name in enumerate(names):
        answer = await server.register(name, wav(seconds=1.5 + number), **fields)
        assert answer.status_code == 200, answer.text


def noise(seconds):
    """A clip that no codec makes smaller."""
    rate_hz = 24_000
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, int(seconds * rate_hz))
    return sndfile_bytes(samples.astype(np.float32), rate_hz, "WAV")


def voices_in(data):
    reader = ArchiveReader(io.BytesIO(data))
    names = [read(member.data, b"").voice.name for member in reader]
    assert reader.summary is not None
    return names, [each.name for each in reader.summary.left_out]


async def archive(server, **query):
    answer = await server.client.get(ARCHIVE, params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-tar"
    return voices_in(answer.content)


async def test_all_voices_or_those_that_are_asked_for_come_in_one_stream(
    server, monkeypatch
):
    monkeypatch.setattr(archive_routes, "_PAGE", 2)
    await register(server, "Ann", "bundle", "import")
    await register(server, "Dora", "Eve", labels='{"team": "news"}')
    everyone = ["Ann", "bundle", "Dora", "Eve", "import"]
    assert await archive(server) == (everyone, [])
    assert await archive(server, label="team:news") == (["Dora", "Eve"], [])
    assert await archive(server, search="an") == (["Ann"], [])
    assert await archive(server, search="nobody") == ([], [])
    # A name is a name, whatever other routes are called.
    eve = (await server.client.get(f"{VOICES}/eve")).json()["voice"]["id"]
    names = ["import", eve, "Eve", "bundle"]
    assert await archive(server, name=names) == (["import", "Eve", "bundle"], [])


async def test_what_it_holds_is_what_each_voices_bundle_is(server):
    await register(server, "Ann", ref_text="words")
    await server.client.post(f"{VOICES}/Ann/cache")
    bundle = (await server.client.get(f"{VOICES}/Ann/bundle")).content
    whole = (await server.client.get(ARCHIVE)).content
    (member,) = ArchiveReader(io.BytesIO(whole))
    assert member.data == bundle
    assert read(bundle, b"").encodings()


async def test_what_is_no_bundle_or_goes_meanwhile_is_counted_at_the_end(
    server, monkeypatch
):
    await register(server, "Ann", "Bea", "Cid")
    export = server.service.bundles.export

    def deleting(name, tenant):
        record, data = export(name, tenant)
        if record.name == "Ann":  # while the first of them is sent
            server.service.store.remove_files(server.service.store.delete("Bea"))
        return record, data

    monkeypatch.setattr(server.service.bundles, "export", deleting)
    assert await archive(server) == (["Ann", "Cid"], ["Bea"])


@pytest.mark.parametrize(
    ("query", "status", "said"),
    [
        ({"name": "nobody"}, 404, "nobody"),
        ({"name": "Ann", "search": "n"}, 400, "not both"),
        ({"label": "team"}, 400, "key:value"),
        ({"name": ["Ann"] * 1001}, 400, "1000"),
    ],
)
async def test_what_cannot_be_answered_is_refused_before_it_begins(
    server, query, status, said
):
    await register(server, "Ann")
    answer = await server.client.get(ARCHIVE, params=query)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text


async def test_an_operator_who_lets_no_audio_out_lets_none_out_here(
    default_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPEAKER_AUDIO_DOWNLOAD", "0")
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        assert (await server.client.get(ARCHIVE)).status_code == 403


async def test_a_client_that_reads_slowly_or_leaves_holds_one_bundle_at_most(
    server, monkeypatch
):
    """Its place is free again, and no voice is read for it any more."""
    clip = noise(seconds=25.0)
    for number in range(40):
        await server.register(f"voice {number:02}", clip, check="false")
    asked = []
    export = server.service.bundles.export
    monkeypatch.setattr(
        server.service.bundles, "export", lambda n, t: asked.append(n) or export(n, t)
    )
    archives = server.service.archives
    async with listening(server.app) as port:
        for _ in range(2):
            url = f"http://127.0.0.1:{port}{ARCHIVE}"
            async with (
                httpx.AsyncClient() as client,
                client.stream("GET", url) as answer,
            ):
                assert answer.status_code == 200
                chunks = answer.aiter_raw(1024)
                await anext(chunks)
                await asyncio.sleep(1.0)
                assert archives._num_free == 1
                # What the sockets hold, and one more.
                assert len(asked) < 30
            await soon(lambda: archives._num_free == 2)
            begun = len(asked)
            await asyncio.sleep(0.3)
            assert len(asked) == begun
            asked.clear()


async def test_one_more_than_may_be_sent_at_once_is_told_to_wait(server):
    await register(server, "Ann")
    places = [server.service.archives.enter() for _ in range(2)]
    assert (await server.client.get(f"{VOICES}/Ann/bundle")).status_code == 200
    assert (await server.client.get(ARCHIVE)).status_code == 503
    places.pop()()
    assert await archive(server) == (["Ann"], [])


async def test_a_client_that_reads_nothing_more_loses_its_place(server, monkeypatch):
    monkeypatch.setattr(sending, "SEND_SECONDS", 1.0)
    clip = noise(seconds=25.0)
    for number in range(40):
        await server.register(f"voice {number:02}", clip, check="false")
    await loses_its_place(server, ARCHIVE, server.service.archives)


async def test_so_does_one_that_reads_no_more_of_a_bundle(server, monkeypatch):
    """And the server does not hold all of it in a buffer of the socket's."""
    monkeypatch.setattr(sending, "SEND_SECONDS", 1.0)
    await register(server, "Ann")
    export = server.service.bundles.export
    monkeypatch.setattr(
        server.service.bundles, "export", lambda *which: (export(*which)[0], LARGE)
    )
    await loses_its_place(server, f"{VOICES}/Ann/bundle", server.service.exports)


async def test_a_bundle_says_how_long_it_is(server):
    await register(server, "Ann")
    answer = await server.client.get(f"{VOICES}/Ann/bundle")
    assert answer.headers["content-length"] == str(len(answer.content))
    assert read(answer.content, b"").voice.name == "Ann"
    assert server.service.exports._num_free == MAX_BUNDLES


async def test_voices_are_looked_up_beside_the_event_loop_when_there_is_a_place(
    server, monkeypatch
):
    await register(server, "Ann", "Bob")
    find, threads = server.service.store.find, []
    monkeypatch.setattr(
        server.service.store,
        "find",
        lambda *which: threads.append(threading.current_thread()) or find(*which),
    )
    assert await archive(server, name=["Bob", "Ann"]) == (["Bob", "Ann"], [])
    assert threads and threading.main_thread() not in threads
    threads.clear()
    nobody = {"name": ["Ann"] * 500 + ["nobody"]}
    assert (await server.client.get(ARCHIVE, params=nobody)).status_code == 404
    assert server.service.archives._num_free == MAX_ARCHIVES
    for _ in range(MAX_ARCHIVES):
        server.service.archives.enter()
    threads.clear()
    assert (await server.client.get(ARCHIVE, params=nobody)).status_code == 503
    assert not threads


def failing(server, monkeypatch, *, times):
    """The catalogue is down so often, and then is not."""
    export, left = server.service.bundles.export, iter(range(times))

    def once_more(name, tenant):
        if next(left, None) is None:
            return export(name, tenant)
        raise StorageUnavailableError("postgresql://db", "it is down", 0)

    monkeypatch.setattr(server.service.bundles, "export", once_more)


async def test_a_catalogue_that_is_down_for_a_moment_costs_no_voice(
    server, monkeypatch
):
    await register(server, "Ann", "Bob")
    failing(server, monkeypatch, times=20)
    assert await archive(server) == (["Ann", "Bob"], [])


async def test_an_archive_breaks_off_where_the_catalogue_stays_down(
    server, monkeypatch
):
    monkeypatch.setattr(archive_routes, "PATIENCE_SECONDS", 0.0)
    await register(server, "Ann", "Bob")
    failing(server, monkeypatch, times=10**9)
    with pytest.raises(InvalidArchiveError, match="ends in the middle"):
        await archive(server)
