"""Rows that a server remembers, where the catalogue is on PostgreSQL, are today's."""

import asyncio
import time

import pytest

from tests.catalogues import (  # noqa: F401  a fixture and a hook: on both engines
    engine,
    pytest_generate_tests,
)
from tests.lease_times import SECONDS, silent_for
from tests.store_samples import opened, register
from tests.unit.test_service import Rig
from tests.waiting import soon
from vllm_tts_cache.catalogue import leases
from vllm_tts_cache.catalogue.changes import SpeakerChanges
from vllm_tts_cache.entrypoints import record_memory, record_news
from vllm_tts_cache.entrypoints.record_memory import RecordMemory
from vllm_tts_cache.entrypoints.uploads import Upload
from vllm_tts_cache.errors import StorageUnavailableError
from vllm_tts_cache.store.participation import News
from vllm_tts_cache.tenants import ALONE, Caller

EMBEDDING = (0.5,) * 16
server = pytest.mark.postgresql


@pytest.fixture
async def rigs(tmp_path):
    made = [Rig(tmp_path), Rig(tmp_path)]
    for each in made:
        if engine_of(each) == "postgresql":
            await soon(lambda each=each: each.service.lookups.known.is_current)
    yield made
    for each in made:
        await each.close()


def engine_of(rig):
    return "sqlite" if rig.store.catalogue.is_local else "postgresql"


async def spoken(rig, name="Ann"):
    return await rig.service.lookups.find_to_speak(ALONE, name)


def reads(rig):
    return rig.service.lookups.known.counts.read


async def test_a_file_is_read_for_each_request_and_nothing_is_remembered(tmp_path):
    rig = Rig(tmp_path)
    if engine_of(rig) == "sqlite":
        await rig.register()
        for number in range(1, 4):
            assert await spoken(rig) is not None
            assert reads(rig) == number
        assert len(rig.service.lookups.known) == 0
    await rig.close()


@server
async def test_a_voice_that_was_spoken_is_asked_for_once(rigs):
    rig, other = rigs
    record = await other.register()
    for _ in range(5):
        assert (await spoken(rig)).record == record
        assert (await spoken(rig, record.speaker_id)).record == record
    assert reads(rig) == 2
    shown = await rig.service.stats(Caller(tenant=None))
    assert shown["records"] == {"speakers": 2, "remembered": 8, "read": 2}


@server
async def test_nobody_speaks_as_before_once_a_change_is_answered(rigs):
    rig, other = rigs
    ann = await other.register()
    for number in range(5):
        assert (await spoken(rig)).record == ann
        changes = SpeakerChanges({"name": "Bob"})
        await other.service.change(ALONE, "Ann", changes)
        assert await spoken(rig) is None
        again = await other.register(pitch_hz=200 + 10 * number)
        assert (await spoken(rig)).record == again
        await other.service.deletions.delete("Bob", ALONE.name)
        assert await spoken(rig, "Bob") is None
        ann = again


@server
async def test_what_replaces_a_voice_is_spoken_from_the_answer_on(rigs):
    rig, other = rigs
    for pitch_hz in (150, 200, 250, 300):
        record = await other.register(pitch_hz=pitch_hz)
        for each in rigs:
            assert (await spoken(each)).record == record
    assert reads(rig) == 4


@server
async def test_an_embedding_is_remembered_and_goes_with_its_voice(rigs):
    rig, other = rigs
    register = other.service.register_embedding
    upload = Upload(name="Vec", consent="yes")
    await register(ALONE, upload, EMBEDDING)
    found = await spoken(rig, "Vec")
    for _ in range(2):
        assert await rig.service.lookups.embedding(found.record) == EMBEDDING
    assert rig.service.lookups.known._embeddings.keys() == {found.record.speaker_id}
    await other.service.deletions.delete("Vec", ALONE.name)
    assert rig.service.lookups.known._embeddings == {}
    assert await spoken(rig, "Vec") is None
    second = tuple(-value for value in EMBEDDING)
    await register(ALONE, upload, EMBEDDING)
    await spoken(rig, "Vec")
    await register(ALONE, upload, second)
    found = await spoken(rig, "Vec")
    assert await rig.service.lookups.embedding(found.record) == second


def works(store):
    try:
        return store.catalogue.count() == 1
    except StorageUnavailableError:
        return False


@server
async def test_without_the_catalogue_known_voices_are_found_for_a_while(
    rigs, postgres, monkeypatch
):
    rig, other = rigs
    record = await other.register()
    await spoken(rig)
    postgres.stop()
    try:
        for _ in range(3):
            assert (await spoken(rig)).record == record
        with pytest.raises(StorageUnavailableError):
            await spoken(rig, "Bob")
        later = record_memory.boot_seconds() + SECONDS
        monkeypatch.setattr(record_memory, "boot_seconds", lambda: later)
        with pytest.raises(StorageUnavailableError):
            await spoken(rig)
    finally:
        postgres.start()
    monkeypatch.undo()
    for each in rigs:
        await soon(lambda each=each: works(each.store))
    assert (await spoken(rig)).record == record


@server
async def test_whoever_is_waited_for_no_longer_remembers_nothing(rigs, monkeypatch):
    """Others change and delete without it."""
    rig, other = rigs
    await other.register()
    await spoken(rig)
    monkeypatch.setattr(leases, "RENEW_SECONDS", 3600.0)
    monkeypatch.setattr(leases, "GAP_SECONDS", 60.0)
    await asyncio.sleep(2.5)  # until the last of the renewals that were due
    with rig.store.catalogue.database.write() as db:
        silent_for(db, SECONDS + 1)
    await soon(lambda: not rig.service.lookups.known.is_current)
    num_reads = reads(rig)
    assert await spoken(rig) is not None
    assert reads(rig) == num_reads + 1


def hears_nothing():
    return News(change=0, speaker_ids=[], seconds=0.0)


@server
async def test_a_change_waits_for_a_server_that_does_not_hear(rigs, monkeypatch):
    rig, other = rigs
    await other.register()
    await spoken(rig)
    monkeypatch.setattr(record_news, "PATIENCE_SECONDS", 60.0)
    news = rig.store.news
    monkeypatch.setattr(rig.store, "news", hears_nothing)
    changing = asyncio.create_task(other.register(pitch_hz=300))
    await asyncio.sleep(1.0)
    assert not changing.done()
    monkeypatch.setattr(rig.store, "news", news)
    record = await changing
    assert (await spoken(rig)).record == record


@server
async def test_after_too_many_changes_all_is_deleted(rigs, monkeypatch):
    rig, other = rigs
    monkeypatch.setattr("vllm_tts_cache.catalogue.changed_speakers.MAX_TOLD", 3)
    for name in "abcdef":
        await other.register(name)
        await spoken(rig, name)
    assert len(rig.service.lookups.known) == 6
    news = rig.store.news
    monkeypatch.setattr(
        rig.store, "news", lambda: News(change=0, speaker_ids=[], seconds=0.0)
    )
    monkeypatch.setattr(record_news, "PATIENCE_SECONDS", 0.0)
    for name in "abcd":
        await other.service.change(ALONE, name, SpeakerChanges({"name": name * 2}))
    monkeypatch.setattr(rig.store, "news", news)
    await soon(lambda: len(rig.service.lookups.known) == 0)
    assert await spoken(rig, "a") is None
    assert (await spoken(rig, "e")).record.name == "e"


@pytest.fixture
def store(tmp_path):
    made = opened(tmp_path / "voices")
    for number, name in enumerate("abc"):
        register(made, name, number)
    yield made
    made.close()


@pytest.fixture
def memory():
    made = RecordMemory(time.time, max_speakers=2)
    made.trust(float("inf"))
    return made


@pytest.mark.sqlite
async def test_what_changes_while_it_is_read_is_not_kept(store, memory):
    """The row had been read, and came after the news."""

    async def read():
        found = store.find("a")
        memory.delete(found.record.speaker_id)
        return found

    assert await memory.find("default", "a", read) is not None
    assert len(memory) == 0


@pytest.mark.sqlite
async def test_the_least_recently_spoken_go(store, memory):
    async def find(name):
        async def read():
            return store.find(name)

        return (await memory.find("default", name, read)).record.name

    for name in "abaca":
        assert await find(name) == name
    assert (len(memory), memory.counts.read) == (2, 3)
    assert memory._keys.keys() == {store.find(n).record.speaker_id for n in "ac"}
    assert await find("b") == "b"
    memory.delete_all()
    assert len(memory) == 0
