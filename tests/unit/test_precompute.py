"""Registered and not encoded is a query: nothing that breaks leaves a voice out."""

import asyncio
import threading
from pathlib import Path

import pytest
from sqlalchemy import update

from tests.in_process_workers import clip, decoded, new_speaker
from tests.store_samples import opened
from tests.unit.test_service import NAMES, Rig
from tests.waiting import soon
from vllm_tts_cache.audio.reference import AUDIO, Segment
from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.catalogue.records import SpeakerChanges
from vllm_tts_cache.entrypoints.speakers import ensure, pending
from vllm_tts_cache.errors import (
    EncodeError,
    ObjectStoreError,
    StorageFullError,
    StorageUnavailableError,
    WorkerRPCError,
    WorkerStorageError,
)
from vllm_tts_cache.store.writer import Writer
from vllm_tts_cache.tenants import ALONE

NUM_VOICES = 12


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(ensure, "PRECOMPUTE_SECONDS", 0.05)
    monkeypatch.setattr(pending, "OUTAGE_SECONDS", 0.1)


@pytest.fixture
async def rig_of(tmp_path):
    rigs = []

    def make(**settings):
        rigs.append(Rig(tmp_path, **settings))
        return rigs[-1]

    yield make
    for each in rigs:
        await asyncio.wait_for(each.close(), 60)


def register(store, number, **fields):
    new = new_speaker(f"voice {number}", clip(number), ref_text="Said.", **fields)
    return store.registrations.register(new, decoded(clip(number))).record


def num_encoded(store):
    return store.usage()[Segment.REGISTERED]["encodings"].num_files


async def all_are_encoded(rig, num_voices=NUM_VOICES):
    await soon(lambda: num_encoded(rig.store) == num_voices * len(NAMES))


async def test_a_start_encodes_what_was_registered_before_it(rig_of, tmp_path):
    store = opened(tmp_path)
    for number in range(NUM_VOICES):
        register(store, number)
    register(store, NUM_VOICES, precompute=False)
    store.close()
    rig = rig_of()
    await all_are_encoded(rig)
    await rig.settled()
    assert rig.encodes == dict.fromkeys(NAMES, NUM_VOICES), "each once"


async def test_a_call_that_fails_leaves_no_voice_out(rig_of, monkeypatch):
    rig = rig_of()
    called, num_failures = rig.engine.called, 6

    def failing(method, args=()):
        nonlocal num_failures
        if method == "tts_cache_want" and num_failures:
            num_failures -= 1
            raise WorkerRPCError("the connection was lost")
        return called(method, args)

    monkeypatch.setattr(rig.engine, "called", failing)
    for number in range(NUM_VOICES):
        record = register(rig.store, number)
        rig.service.encodings.precompute_from(record.generation)
    await all_are_encoded(rig)
    assert num_failures == 0


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_catalogue_that_is_away_leaves_none_out(rig_of, monkeypatch, is_new):
    rig = rig_of()
    if not is_new:
        await rig.settled()
    for number in range(NUM_VOICES):
        register(rig.store, number)

    def away(*_):
        raise StorageUnavailableError("the database", "it is away")

    reads = "unencoded", "stored_artifacts", "to_retry"
    with monkeypatch.context() as broken:
        for name in (*reads, "first_to_precompute"):
            broken.setattr(rig.store, name, away)
        broken.setattr(rig.service.encodings.pending, "_stored_since", away)
        if not is_new:
            rig.service.encodings.precompute_from(1)
        await asyncio.sleep(0.5)
        assert num_encoded(rig.store) == 0
    await all_are_encoded(rig)


@pytest.mark.parametrize("is_noted", [False, True])
async def test_what_was_not_stored_is_stored_later(rig_of, monkeypatch, is_noted):
    """As no row said that it was to be done again, only a restart did it."""
    rig = rig_of()
    record = register(rig.store, 0)
    kind = StorageFullError if is_noted else StorageUnavailableError
    error = kind(*[] if is_noted else ["the database", "it is away"])

    def fails(*_):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(Writer, "publish", fails)
        rig.service.encodings.precompute_from(1)
        await soon(lambda: sum(rig.encodes.values()) == len(NAMES))
        await rig.precompute("voice 0")  # as a request does: it waits for no disk
        if is_noted:
            await rig.settled()
            reason = f"it was not stored: {error}"
            assert await rig.status("voice 0") == ("failed", reason)
    with rig.store.database.write() as db:
        db.execute(update(schema.failed_encode).values(next_try=0.0))
    await all_are_encoded(rig, 1)
    await rig.settled()
    assert rig.store.failures(record.audio_sha256) == {}
    assert set(rig.encodes.values()) == {1}, "stored, and not encoded again"


def bucket_is_down(*_):
    raise ObjectStoreError("s3://bucket", "it is down")


@pytest.mark.parametrize("away", ["bucket", "audio", "audio until it is back"])
async def test_what_is_away_for_long_leaves_none_out(rig_of, monkeypatch, away):
    monkeypatch.setattr(ensure, "MAX_PAUSE_SECONDS", 0.4)
    rig = rig_of()
    with monkeypatch.context() as broken:
        if away == "bucket":
            broken.setattr(Writer, "publish", bucket_is_down)
        else:
            broken.setattr(rig.speakers._work._store, "read_audio", lambda *_: None)
        sha = register(rig.store, 0).audio_sha256
        rig.service.encodings.precompute_from(1)
        await soon(lambda: len(rig.store.failures(sha)) == len(NAMES))
    if away == "audio until it is back":
        Path(rig.store.files.file_name(sha, AUDIO)).unlink()
        rig.service.encodings.precompute_from(register(rig.store, 0).generation)
    else:
        with rig.store.database.write() as db:
            db.execute(update(schema.failed_encode).values(next_try=0.0))
    await all_are_encoded(rig, 1)
    assert set(rig.encodes.values()) == {1}


async def test_a_transcript_that_comes_during_an_encode_is_precomputed(rig_of):
    rig = rig_of()
    for encoder in rig.encoders:
        encoder.gate.clear()
    sample = decoded(clip(1))
    rig.store.registrations.register(new_speaker("Ann", clip(1)), sample)
    rig.service.encodings.precompute_from(1)
    await soon(lambda: rig.service.encodings.pending)
    change = SpeakerChanges({"ref_text": "What is said."})
    await rig.service.change(ALONE, "Ann", change)
    for encoder in rig.encoders:
        encoder.gate.set()
    await all_are_encoded(rig, 1)


async def test_a_clip_that_comes_back_before_files_go_is_encoded(rig_of, monkeypatch):
    """A file without a row is none: it is on its way out."""
    rig = rig_of()
    remove_files, may_remove = rig.store.remove_files, threading.Event()

    def later(deletion):
        may_remove.wait(60)
        remove_files(deletion)

    monkeypatch.setattr(rig.store, "remove_files", later)
    for number in (0, 1, 0):
        new = new_speaker("Ann", clip(number), ref_text="Said.")
        done = rig.store.registrations.register(new, decoded(clip(number)))
        rig.service.registered(done)
        if not number:
            await asyncio.sleep(0.3)
    may_remove.set()
    await soon(lambda: not rig.store.num_unfinished_deletions())
    await all_are_encoded(rig, 1)


async def test_a_worker_without_its_bucket_fails_a_request_for_now(rig_of, monkeypatch):
    rig = rig_of()
    sha = register(rig.store, 0, precompute=False).audio_sha256
    monkeypatch.setattr(rig.speakers._work._store, "read_audio", bucket_is_down)
    with pytest.raises(WorkerStorageError, match="object store") as caught:
        await rig.precompute("voice 0")
    assert (caught.value.http_status, caught.value.retry_after_seconds) == (503, 5)
    assert rig.store.failures(sha) == {}, "no encode failed"


async def test_two_servers_encode_each_voice_once(rig_of):
    rigs = [rig_of(), rig_of()]
    for number in range(NUM_VOICES):
        register(rigs[0].store, number)
    for rig in rigs:
        rig.service.encodings.precompute_from(1)
    await all_are_encoded(rigs[0])
    for rig in rigs:
        await rig.settled()
    for name in NAMES:
        assert sum(rig.encodes[name] for rig in rigs) == NUM_VOICES


async def failed_once(rig):
    rig.encoders[0].errors += [EncodeError("it cannot")]
    record = register(rig.store, 0)
    rig.service.encodings.precompute_from(record.generation)
    await soon(lambda: rig.store.failures(record.audio_sha256) != {})
    return record


async def test_a_failed_encode_is_tried_again_when_its_row_says_so(rig_of):
    record = await failed_once(rig := rig_of())
    await rig.settled()
    assert await rig.status("voice 0") == ("failed", "it cannot")
    num_calls = rig.encoders[0].num_calls
    await asyncio.sleep(0.3)  # several looks
    assert rig.encoders[0].num_calls == num_calls
    with rig.store.database.write() as db:
        db.execute(update(schema.failed_encode).values(next_try=0.0))
    await all_are_encoded(rig, 1)
    await rig.settled()
    assert rig.store.failures(record.audio_sha256) == {}
    assert await rig.status("voice 0") == ("ready", None)


async def test_a_deleted_voice_leaves_no_failure_behind(rig_of):
    record = await failed_once(rig := rig_of())
    await rig.service.deletions.delete("voice 0", record.tenant)
    assert rig.store.failures(record.audio_sha256) == {}


async def test_no_more_than_so_many_are_under_way(rig_of, monkeypatch):
    monkeypatch.setattr(ensure, "MAX_PRECOMPUTED_AT_ONCE", 3)
    rig = rig_of()
    rig.encoders[0].gate.clear()
    for number in range(NUM_VOICES):
        register(rig.store, number)
    rig.service.encodings.precompute_from(1)
    await soon(rig.encoders[0].entered.is_set)
    await asyncio.sleep(0.2)
    assert len(rig.service.encodings.pending) <= 3 * len(NAMES)
    rig.encoders[0].gate.set()
    await all_are_encoded(rig)


async def test_who_forces_nothing_ends_no_forced_encode(rig_of, monkeypatch):
    monkeypatch.setattr(ensure, "IN_TURN_SECONDS", 0.05)
    rig = rig_of()
    await rig.ready()
    found = await rig.service.lookups.get(ALONE, "Ann")
    again, encodings = rig.encodes["speaker"] + 1, rig.service.encodings
    rig.encoders[0].gate.clear()
    for force in (True, False):
        await encodings.precompute(found, force=force, urgent=False)
    rig.encoders[0].gate.set()
    await soon(lambda: rig.encodes["speaker"] == again)


async def test_a_full_disk_of_encodings_is_not_made_anew_at_a_start(rig_of, tmp_path):
    store = opened(tmp_path)
    for number in range(NUM_VOICES):
        register(store, number)
    store.close()
    first = Rig(tmp_path)
    await all_are_encoded(first)
    assert first.store.first_to_precompute() == 1
    used = first.store.usage()[Segment.REGISTERED]["encodings"].num_bytes
    await first.close()
    again = rig_of(disk_max_bytes=used // 2, inline_share=0.01)
    again.store.writer.trim()
    await again.settled()
    assert sum(again.encodes.values()) == 0
    record = register(again.store, NUM_VOICES)
    again.service.encodings.precompute_from(record.generation)
    await soon(lambda: sum(again.encodes.values()) == len(NAMES))


async def test_a_pass_begins_where_the_one_before_ended(rig_of, monkeypatch):
    """Each read all voices again, a million in ten seconds, every five seconds."""
    rig = rig_of()
    records = [register(rig.store, number) for number in range(NUM_VOICES)]
    rig.service.encodings.precompute_from(1)
    await all_are_encoded(rig)
    await rig.settled()
    unencoded, asked = rig.store.unencoded, []

    def seen(fingerprints, after, limit):
        asked.append(after)
        if len(asked) == 1:  # a client wants it again while others are looked for
            rig.service.encodings.precompute_from(records[3].generation)
        return unencoded(fingerprints, after, limit)

    monkeypatch.setattr(rig.store, "unencoded", seen)
    await rig.settled()
    last, again = records[-1].generation, records[3].generation - 1
    assert asked[:2] == [last, again] and set(asked[2:]) <= {last}
