"""A request reads its voice's row; the last one serves while the catalogue is away."""

import asyncio
import contextlib
from dataclasses import replace
from unittest.mock import Mock

import msgspec
import pytest

from tests.catalogues import engine, pytest_generate_tests  # noqa: F401
from tests.lease_times import SECONDS, silent_for
from tests.store_samples import opened, register
from tests.unit.test_service import Rig
from tests.waiting import soon
from vllm_tts_cache.catalogue import leases
from vllm_tts_cache.catalogue.records import SpeakerChanges
from vllm_tts_cache.entrypoints.speakers import lookups
from vllm_tts_cache.entrypoints.speakers.lookups import LastRows, boot_seconds
from vllm_tts_cache.entrypoints.speakers.registering import Upload
from vllm_tts_cache.errors import StorageUnavailableError
from vllm_tts_cache.tenants import ALONE

pytestmark = pytest.mark.every_backend

EMBEDDING = (0.5,) * 16
server = pytest.mark.postgresql


@pytest.fixture
async def rigs(tmp_path):
    made = [Rig(tmp_path), Rig(tmp_path)]
    if not made[0].store.is_local:
        for each in made:
            await soon(lambda each=each: last_of(each)._good_until > 0.0)
    yield made
    for each in made:
        await each.close()


def last_of(rig):
    return rig.service.lookups.last


async def spoken(rig, name="Ann"):
    return await rig.service.lookups.find_to_speak(ALONE, name)


async def test_every_server_speaks_what_was_answered_last(rigs):
    rig, other = rigs
    for number in range(5):
        ann = await other.register(pitch_hz=200 + 10 * number)
        for name in ("Ann", ann.speaker_id):
            assert (await spoken(rig, name)).record == ann
        bob = await other.service.change(ALONE, "Ann", SpeakerChanges({"name": "Bob"}))
        assert await spoken(rig) is None
        assert (await spoken(rig, "Bob")).record == bob
        await other.service.deletions.delete("Bob", ALONE.name)
        assert await spoken(rig, "Bob") is None


async def test_a_change_waits_for_no_server(rigs, monkeypatch):
    """Each took fifteen seconds while another server was slow to delete something."""
    rig, other = rigs
    await other.register()
    go_on, confirm = asyncio.Event(), rig.service.deletions._confirm_one

    async def held(deletion):
        await go_on.wait()
        await confirm(deletion)

    monkeypatch.setattr(rig.service.deletions, "_confirm_one", held)
    try:
        record = await asyncio.wait_for(other.register(pitch_hz=300), 60)
        assert (await spoken(rig)).record == record
        assert rig.store.num_unfinished_deletions() == 1
    finally:
        go_on.set()


async def test_an_embedding_is_that_of_the_row(rigs):
    rig, other = rigs
    upload = Upload(name="Vec", consent="yes")
    for embedding in (EMBEDDING, tuple(-value for value in EMBEDDING)):
        await other.service.uploads.register_embedding(ALONE, upload, embedding)
        found = await spoken(rig, "Vec")
        assert await rig.service.lookups.embedding(found.record) == embedding
    await other.service.deletions.delete("Vec", ALONE.name)
    assert await spoken(rig, "Vec") is None


def works(store):
    try:
        return store.num_speakers() >= 1
    except StorageUnavailableError:
        return False


@contextlib.asynccontextmanager
async def outage(postgres, rigs):
    """The catalogue's server is down, and serves all again behind the block."""
    postgres.stop()
    try:
        yield
    finally:
        postgres.start()
    for each in rigs:
        await soon(lambda each=each: works(each.store))


@server
async def test_without_the_catalogue_known_voices_speak_on(rigs, postgres, monkeypatch):
    rig, other = rigs
    record = await other.register()
    gone = await other.register("Gone", pitch_hz=300)
    upload = Upload(name="Vec", consent="yes")
    await other.service.uploads.register_embedding(ALONE, upload, EMBEDDING)
    await spoken(rig)
    await spoken(rig, "Gone")
    vec = (await spoken(rig, "Vec")).record
    await rig.service.lookups.embedding(vec)
    await other.service.deletions.delete("Gone", ALONE.name)
    async with outage(postgres, rigs):
        for _ in range(3):
            assert (await spoken(rig)).record == record
        assert (await spoken(rig, "Vec")).record == vec
        assert await rig.service.lookups.embedding(vec) == EMBEDDING
        for name in ("Bob", "Gone", gone.speaker_id):
            with pytest.raises(StorageUnavailableError):
                await spoken(rig, name)
        with monkeypatch.context() as aged, pytest.raises(StorageUnavailableError):
            later = boot_seconds() + SECONDS
            aged.setattr(lookups, "boot_seconds", lambda: later)
            await spoken(rig)
    again = await other.register(pitch_hz=400)
    assert (await spoken(rig)).record == again


@server
async def test_without_the_catalogue_no_name_means_what_it_meant_before(rigs, postgres):
    rig, other = rigs
    upload, change = Upload(name="Vec", consent="yes"), SpeakerChanges({"name": "Bob"})
    await other.register()
    await other.service.uploads.register_embedding(ALONE, upload, EMBEDDING)
    for name in ("Ann", "Vec"):
        await spoken(rig, name)
    await other.service.change(ALONE, "Ann", change)
    await other.register(pitch_hz=300)
    negated = tuple(-value for value in EMBEDDING)
    await other.service.uploads.register_embedding(ALONE, upload, negated)
    await soon(lambda: not rig.store.num_unfinished_deletions())
    async with outage(postgres, rigs):
        for name in ("Ann", "Vec"):
            with pytest.raises(StorageUnavailableError):
                await spoken(rig, name)


@server
async def test_who_is_waited_for_no_longer_has_no_last_row(rigs, postgres, monkeypatch):
    """Others delete without it."""
    rig, other = rigs
    await other.register()
    await spoken(rig)
    monkeypatch.setattr(leases, "RENEW_SECONDS", 3600.0)
    monkeypatch.setattr(leases, "GAP_SECONDS", 60.0)
    await asyncio.sleep(2.5)  # until the last of the renewals that were due
    with rig.store.database.write() as db:
        silent_for(db, SECONDS + 1)
    await soon(lambda: last_of(rig)._good_until < boot_seconds())
    async with outage(postgres, rigs):
        with pytest.raises(StorageUnavailableError):
            await spoken(rig)


@pytest.fixture
def found(tmp_path):
    made = opened(tmp_path / "voices")
    register(made, "a", 0)
    yield made.find("a")
    made.close()


@pytest.mark.sqlite
def test_a_row_is_good_while_deletions_wait_and_until_it_is_deleted(found):
    last = LastRows()
    last.keep("t", "a", found)
    assert last.find("t", "a", 0.0) is None  # nobody has said that they wait
    last.good_for(60.0, boot_seconds())
    assert last.find("t", "a", 0.0) == found
    assert (last.find("t", "b", 0.0), last.find("u", "a", 0.0)) == (None, None)
    ending = msgspec.structs.replace(found.record, expires_at=5.0)
    last.keep("t", "a", replace(found, record=ending))
    assert last.find("t", "a", 4.9) and last.find("t", "a", 5.0) is None
    last.keep("t", "a", None)
    assert last.find("t", "a", 0.0) is None
    last.keep("t", "a", found)
    last.embeddings[found.record.speaker_id, found.record.generation] = EMBEDDING
    last.delete("another")
    assert last.find("t", "a", 0.0) == found
    last.delete(found.record.speaker_id)
    assert last.find("t", "a", 0.0) is None
    assert not last.embeddings


@pytest.mark.sqlite
def test_a_row_is_kept_once_whatever_is_around_its_name(found):
    last = LastRows()
    last.good_for(60.0, boot_seconds())
    for num_spaces in (0, 1, 1_000_000):
        last.keep("t", "a" + num_spaces * " ", found)
        assert last.find("t", num_spaces * " " + "a", 0.0) == found
    assert len(last._rows) == 1


@pytest.mark.sqlite
async def test_an_embedding_is_of_its_voice_and_not_of_a_number(rigs, monkeypatch):
    """A failover that lost a registration gives its generation to another speaker."""
    rig, _ = rigs
    record = await rig.register()
    away = Mock(side_effect=StorageUnavailableError("there", "it is away"))
    monkeypatch.setattr(rig.store, "speaker_embedding", away)
    last_of(rig).embeddings[record.speaker_id, record.generation] = EMBEDDING
    assert await rig.service.lookups.embedding(record) == EMBEDDING
    other = msgspec.structs.replace(record, speaker_id="voice_other")
    with pytest.raises(StorageUnavailableError):
        await rig.service.lookups.embedding(other)


async def test_what_is_read_while_all_is_deleted_is_not_kept(rigs, monkeypatch):
    rig, _ = rigs
    await rig.register()
    find = rig.service.lookups.find

    async def emptied_meanwhile(tenant, name):
        found = await find(tenant, name)
        last_of(rig).delete_all()
        return found

    monkeypatch.setattr(rig.service.lookups, "find", emptied_meanwhile)
    assert await spoken(rig) is not None
    assert len(last_of(rig)._rows) == 0


@pytest.mark.sqlite
async def test_of_a_local_file_nothing_is_kept(tmp_path):
    rig = Rig(tmp_path)
    await rig.register()
    assert await spoken(rig) is not None
    assert len(last_of(rig)._rows) == 0
    await rig.close()


@pytest.mark.sqlite
def test_rows_of_before_a_failover_that_may_have_lost_them_are_not_good(found):
    last = LastRows()
    for epoch, is_known in ((1.0, False), (1.0, True), (2.0, False)):
        last.good_for(60.0, boot_seconds(), epoch)
        assert (last.find("t", "a", 0.0) is not None) is is_known
        last.keep("t", "a", found)
