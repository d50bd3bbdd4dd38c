"""After the answer to a DELETE nothing of the voice is left anywhere."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import select

from tests.catalogues import engine, pytest_generate_tests  # noqa: F401
from tests.lease_times import delete_and_die, delete_participants
from tests.store_samples import opened, settings_of, traces
from tests.unit.test_service import Rig
from tests.waiting import soon
from vllm_tts_cache import errors
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.schema import speaker
from vllm_tts_cache.entrypoints.speakers import deletions
from vllm_tts_cache.entrypoints.speakers.ensure import MAX_PRECOMPUTED_AT_ONCE
from vllm_tts_cache.store.reading import Copies
from vllm_tts_cache.tenants import ALONE


@pytest.fixture
async def rig(tmp_path):
    made = Rig(tmp_path)
    yield made
    await made.settled()
    assert made.store.verify() == []
    await made.close()


@pytest.fixture
async def other(tmp_path):
    """Another server on the same catalogue and directory."""
    made = Rig(tmp_path)
    yield made
    await made.close()


async def delete(rig, name="Ann"):
    await rig.service.deletions.delete(name, ALONE.name)


def left_of(rig, sha):
    # Others may be removing it: `os.walk` takes what goes meanwhile for nothing.
    walked = os.walk(rig.store.directory)
    paths = (Path(at, name) for at, *held in walked for names in held for name in names)
    files = [path for path in paths if sha in str(path)]
    memory = rig.speakers.stats().tiers["memory"].entries
    return files, memory, rig.store.stored_artifacts([sha])[sha]


NOTHING = ([], 0, frozenset())


@pytest.mark.sqlite
async def test_a_log_that_somebody_read_over_a_delete_is_emptied_soon(rig, monkeypatch):
    """What the voice said stayed in it until another voice was deleted."""
    monkeypatch.setattr(deletions, "SWEEP_SECONDS", 0.1)
    words = "what nobody else has said"
    await rig.register(ref_text=words)
    with rig.store.database.snapshot() as db:
        db.execute(select(speaker.c.name)).all()
        await delete(rig)
        await asyncio.sleep(0.5)  # it is tried in vain
        assert traces(rig.store.directory, words)
    await soon(lambda: not traces(rig.store.directory, words))


async def remember(rig, record):
    """Make a part of a prompt, as of a voice that spoke."""

    class Part:
        num_bytes = 1

    async def build():
        return Part()

    key = record.audio_sha256, record.ref_text
    await rig.service.prompts.get_or_build(key, record.audio_sha256, build)


async def test_a_transcript_goes_and_what_another_voice_needs_stays(rig, other):
    """It stayed in the prompt memory of every server."""
    ann = await rig.register("Ann", ref_text="Ann's own words")
    await rig.register("Bob", ref_text="words")
    await rig.precompute()
    for each in (rig, other):
        await remember(each, ann)
    await delete(rig)
    assert await rig.status("Bob") == ("ready", None)
    for each in (rig, other):
        assert each.service.prompts._parts.currsize == 0
        assert each.engine.calls.count("tts_cache_delete") == 0


async def test_a_transcript_that_was_replaced_goes_as_well(rig):
    ann = await rig.register("Ann", ref_text="words")
    await remember(rig, ann)
    again = await rig.register("Ann", ref_text="words")
    assert rig.service.prompts._parts.currsize > 0  # the same voice as before
    assert again.audio_sha256 == ann.audio_sha256
    await rig.register("Ann", ref_text="other words")
    await rig.settled()
    assert rig.service.prompts._parts.currsize == 0
    assert rig.store.stored_artifacts([ann.audio_sha256])[ann.audio_sha256] == {"audio"}


async def test_a_mistake_of_ours_does_not_end_all_deletions(rig, monkeypatch):
    """The task died unheard, and every DELETE was 503 from then on."""
    monkeypatch.setattr(deletions, "AFTER_ERROR_SECONDS", 0.05)
    looks, look = [], rig.store.participants.deletions_to_confirm

    def fails_once():
        looks.append(1)
        if len(looks) == 1:
            raise KeyError("a mistake")
        return look()

    monkeypatch.setattr(rig.store.participants, "deletions_to_confirm", fails_once)
    await rig.register()
    await delete(rig)
    assert len(looks) > 1


async def test_deleting_one_of_two_names_keeps_what_the_other_needs(rig):
    await rig.register("Ann")
    need = rig.service.model.need_of(await rig.register("Bob"))
    await rig.precompute()
    rig.encoders[0].gate.clear()
    making = asyncio.create_task(rig.service.encodings.ensure(need, force=True))
    await soon(lambda: len(rig.service.encodings.pending) > 0)
    await delete(rig)
    rig.encoders[0].gate.set()
    await making
    assert rig.engine.calls.count("tts_cache_delete") == 0
    assert await rig.status("Bob") == ("ready", None)


@pytest.mark.every_backend
async def test_every_api_server_deletes_before_the_answer(rig, other):
    """The other one's prompts and workers kept a deleted voice."""
    record = await rig.ready()
    found = await other.service.lookups.get(ALONE, "Ann")
    await other.service.encodings.precompute(found, force=True)
    await remember(other, record)
    await delete(rig)
    assert left_of(rig, record.audio_sha256) == NOTHING
    assert other.service.prompts._parts.currsize == 0
    assert other.speakers.stats().tiers["memory"].entries == 0
    assert other.engine.calls.count("tts_cache_delete") == 1


@pytest.mark.every_backend
async def test_a_silent_server_is_told_about_and_waited_for(rig, tmp_path, monkeypatch):
    monkeypatch.setattr(deletions, "PATIENCE_SECONDS", 2.0)
    silent = opened(tmp_path)
    silent.participants.join()
    await rig.register()
    for _ in range(2):  # repeated, it tells how far it is
        with pytest.raises(errors.DeletionPendingError) as caught:
            await delete(rig)
        assert tuple(caught.value.details["deletion"].values()) == (True, 1)
    monkeypatch.setattr(deletions, "PATIENCE_SECONDS", 15.0)
    for deletion in silent.participants.deletions_to_confirm():
        silent.participants.confirm(deletion.id)
    await delete(rig)  # it is done, and says so
    with pytest.raises(errors.SpeakerNotFoundError):
        await delete(rig)
    silent.close()


async def test_a_worker_that_cannot_be_asked_now_is_asked_again(rig, monkeypatch):
    """One RPC that failed could never be repeated: 500, then 404, encodings stayed."""
    monkeypatch.setattr(deletions, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(deletions, "AFTER_ERROR_SECONDS", 0.1)
    record = await rig.ready()
    call, broken = rig.engine.collective_rpc, True

    async def sometimes(method, *args, **kwargs):
        if broken and method == "tts_cache_delete":
            raise RuntimeError("the worker is stuck")
        return await call(method, *args, **kwargs)

    monkeypatch.setattr(rig.engine, "collective_rpc", sometimes)
    removed = False
    while not removed:  # as often as a busy machine takes to remove two files
        with pytest.raises(errors.DeletionPendingError) as caught:
            await delete(rig)
        assert caught.value.details["deletion"]["waiting_for"] == 1
        removed = caught.value.details["deletion"]["files_removed"]
    broken = False
    monkeypatch.setattr(deletions, "PATIENCE_SECONDS", 15.0)
    await delete(rig)
    assert left_of(rig, record.audio_sha256) == NOTHING


async def test_workers_that_have_ended_are_not_waited_for(rig, monkeypatch):
    """A server that stops has ended its engine, and goes on for a while."""
    await rig.ready()
    rig.engine.errored = True

    async def refused(*_args, **_kwargs):
        raise RuntimeError("the engine is gone")

    monkeypatch.setattr(rig.engine, "collective_rpc", refused)
    await delete(rig)


async def hold(rig, name="Ann", *, force=False):
    """Have a voice precomputed, and hold its first encode at the gate."""
    gate, entered = rig.encoders[0].gate, rig.encoders[0].entered
    gate.clear()
    entered.clear()
    held = asyncio.create_task(rig.precompute(name, force=force))
    assert await asyncio.to_thread(entered.wait, 20)
    return held


async def test_an_encode_in_hand_is_waited_for_and_leaves_nothing(rig):
    record = await rig.register()
    flight = await hold(rig)
    deleting = asyncio.create_task(delete(rig))
    await asyncio.sleep(1.0)
    assert not deleting.done()
    rig.encoders[0].gate.set()
    await deleting
    with pytest.raises(errors.SpeakerNotFoundError):  # whoever waited for it hears that
        await asyncio.wait_for(flight, 60)
    assert left_of(rig, record.audio_sha256) == NOTHING


async def test_a_voice_far_back_in_line_is_waited_for_no_more(rig):
    """What was to be encoded kept its name and its words in memory, for hours."""
    await rig.register("Held")
    held = await hold(rig, "Held")
    records = [
        await rig.register(f"v{n}", pitch_hz=100.0 + n, seconds=1.0, precompute=True)
        for n in range(MAX_PRECOMPUTED_AT_ONCE - 1)
    ]
    waiting, last = rig.service.encodings._underway, records[-1]
    await soon(lambda: len(waiting) == len(records))
    await delete(rig, last.name)
    await soon(lambda: len(waiting) == len(records) - 1, 5)
    assert last.generation not in waiting
    rig.encoders[0].gate.set()
    await held


@pytest.mark.parametrize("is_copy", [False, True])
async def test_what_a_disk_does_not_delete_holds_up_no_other(rig, monkeypatch, is_copy):
    """A file, or a copy that this machine cannot delete, is tried again and again."""
    monkeypatch.setattr(deletions, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(deletions, "AFTER_ERROR_SECONDS", 0.1)
    bad = await rig.register("Bad")
    await rig.register("Good", pitch_hz=330)
    owner, name, broken = rig.store, "remove_files", True
    if is_copy:
        owner, name = Copies(rig.store.files, rig.store.database, 9), "delete_unstored"
        monkeypatch.setattr(rig.store, "copies", owner)

    def sometimes(given, act=getattr(owner, name)):  # noqa: B008
        if broken and getattr(given, "audio_sha256", given) == bad.audio_sha256:
            raise errors.StorageError("Input/output error")
        return act(given)

    monkeypatch.setattr(owner, name, sometimes)
    with pytest.raises(errors.DeletionPendingError) as caught:
        await delete(rig, "Bad")
    assert caught.value.details["deletion"]["files_removed"] == is_copy
    await delete(rig, "Good")
    broken = False
    monkeypatch.setattr(deletions, "PATIENCE_SECONDS", 15.0)
    await delete(rig, "Bad")


async def test_a_clients_deletion_goes_before_bulk_replacement(rig, monkeypatch):
    """Behind 600 replaced voices it was a 503 after fifteen seconds."""
    await rig.register("Bob", pitch_hz=222)
    remove, removed = rig.store.remove_files, []

    def slowly(deletion):
        time.sleep(0.05)
        removed.append(deletion.id)
        remove(deletion)

    monkeypatch.setattr(rig.store, "remove_files", slowly)
    for number in range(600):  # of rows that are gone: there is nothing to do for them
        rig.service.deletions.carry_out(Deletion(id=10**6 + number, audio_sha256=None))
    began = time.monotonic()
    await delete(rig, "Bob")
    assert len(removed) < 300
    assert time.monotonic() - began < 2


@pytest.mark.every_backend
async def test_what_a_killed_server_began_another_finishes(rig, tmp_path, monkeypatch):
    monkeypatch.setattr(deletions, "ORPHANED_SECONDS", 0.2)
    record = await rig.ready()
    context = multiprocessing.get_context("spawn")
    catalogue_url = settings_of(tmp_path).catalogue_url
    process = context.Process(target=delete_and_die, args=(tmp_path, catalogue_url))
    process.start()
    await asyncio.to_thread(process.join)
    assert process.exitcode == -signal.SIGKILL
    await delete(rig)
    assert left_of(rig, record.audio_sha256) == NOTHING


@pytest.mark.postgresql
async def test_a_deleted_server_deletes_all_and_takes_part_again(rig, other):
    """It remembered what was deleted meanwhile until somebody restarted it."""
    for name, pitch_hz in (("Ann", 220), ("Bob", 330)):
        await remember(rig, await rig.ready(name, pitch_hz=pitch_hz))
    delete_participants(rig.store)
    await delete(other, "Bob")
    memory, prompts = rig.speakers.stats, rig.service.prompts
    await soon(lambda: not memory().tiers["memory"].entries)
    await soon(lambda: not prompts._parts.currsize)
    assert await rig.status("Ann") == ("ready", None)
    await rig.precompute("Ann", force=True)
    await delete(other, "Ann")
    assert rig.speakers.stats().tiers["memory"].entries == 0


@pytest.mark.sqlite
async def test_a_server_without_a_lock_deletes_all_and_takes_part_again(
    rig, other, tmp_path
):
    """It was taken for dead, and kept what was deleted until somebody restarted it."""
    for name, pitch_hz in (("Ann", 220), ("Bob", 330)):
        await rig.register(name, pitch_hz=pitch_hz)
        await other.precompute(name)
        if name == "Ann":
            for path in (tmp_path / "participants").iterdir():
                path.unlink()
        await delete(rig, name)
        await soon(lambda: not other.speakers.stats().tiers["memory"].entries)
        await soon(lambda: rig.store.participants.num_alive() == 1)
    assert other.engine.calls.count("tts_cache_delete") >= 2  # more if it is busy


@pytest.mark.postgresql
async def test_a_deleted_server_that_deletes_waits_for_its_own_memory(rig, monkeypatch):
    """It was done at once: nobody was asked, and so nobody was waited for."""
    monkeypatch.setattr(deletions, "PATIENCE_SECONDS", 0.3)
    record = await rig.ready()
    await remember(rig, record)
    flight = await hold(rig, force=True)
    delete_participants(rig.store)
    with pytest.raises(errors.DeletionPendingError) as caught:
        await delete(rig)
    assert caught.value.details["deletion"]["waiting_for"] == 1
    await asyncio.sleep(3)  # by now it has noticed, and an encode is still in hand
    with pytest.raises(errors.DeletionPendingError) as caught:
        await delete(rig)
    assert tuple(caught.value.details["deletion"].values()) == (True, 1)
    rig.encoders[0].gate.set()
    monkeypatch.setattr(deletions, "PATIENCE_SECONDS", 15.0)
    await delete(rig)
    with pytest.raises(errors.SpeakerNotFoundError):
        await asyncio.wait_for(flight, 60)
    assert left_of(rig, record.audio_sha256) == NOTHING
    assert rig.service.prompts._parts.currsize == 0


EVERY = 0.8


@pytest.fixture
def recoveries(rig, monkeypatch):
    """When the storage was recovered; the next outage is recovered from soon."""
    times, recover = [], rig.store.recover
    rig.service.deletions._recovering.join()

    def recovered():
        times.append(time.monotonic())
        return recover()

    monkeypatch.setattr(rig.store, "recover", recovered)
    monkeypatch.setattr(deletions, "AFTER_ERROR_SECONDS", 0.02)
    monkeypatch.setattr(deletions, "RECOVERY_SECONDS", EVERY)
    monkeypatch.setattr(deletions, "RECOVERY_SPREAD_SECONDS", EVERY / 4)
    return times


def fail_rounds(rig, monkeypatch, **error):
    """Has the next rounds fail; returns what is emptied by them."""
    looks, failures = rig.store.participants.standing, [1] * 3

    def failing():
        if failures:
            failures.pop()
            raise errors.StorageUnavailableError("there", "so", **error)
        return looks()

    monkeypatch.setattr(rig.store.participants, "standing", failing)
    return failures


async def test_a_busy_catalogue_is_not_recovered_from(rig, monkeypatch, recoveries):
    """All files were gone through whenever somebody else had been writing for long."""
    failures = fail_rounds(rig, monkeypatch, was_cut_off=False)
    await asyncio.sleep(2 * EVERY)
    assert (failures, recoveries) == ([], [])


async def test_outages_are_recovered_from_seldom_and_not_by_all_at_once(
    rig, monkeypatch, recoveries
):
    began = time.monotonic()
    for _ in range(4):
        fail_rounds(rig, monkeypatch)
        await asyncio.sleep(EVERY / 2)
    await soon(lambda: recoveries)
    await asyncio.sleep(EVERY / 2)
    took = time.monotonic() - began
    assert 1 <= len(recoveries) <= took / EVERY
    monkeypatch.setattr(deletions, "RECOVERY_SPREAD_SECONDS", 3600.0)
    planned = set()
    for _ in range(3):
        rig.service.deletions._recover_at = None
        fail_rounds(rig, monkeypatch)
        await soon(lambda: rig.service.deletions._recover_at)
        planned.add(rig.service.deletions._recover_at)
    assert len(planned) == 3


@pytest.mark.every_backend
async def test_a_server_that_is_shut_down_is_waited_for_no_longer(rig, tmp_path):
    other = Rig(tmp_path)
    await other.close()
    await rig.register()
    await delete(rig)


@pytest.mark.sqlite
async def test_who_looks_while_it_leaves_joins_no_more(rig, tmp_path, monkeypatch):
    other, exists = Rig(tmp_path), Path.exists
    theirs = other.store.participants
    mine = vars(theirs)["_presence"].path
    leaving = threading.Thread(target=theirs.leave)
    starts = iter([leaving.start])  # others look at the file as well

    def leave_first(path):
        for start in starts if path == mine else ():
            start()
            leaving.join(0.5)
        return exists(path)

    monkeypatch.setattr(Path, "exists", leave_first)
    theirs.standing()
    leaving.join()
    assert theirs.id is None and rig.store.participants.num_alive() == 0
    await other.close()


@pytest.mark.every_backend
async def test_a_voice_registered_again_while_it_is_deleted_lives(rig):
    await rig.ready()
    deleting = asyncio.create_task(delete(rig))
    await asyncio.sleep(0)
    record = await rig.register()
    with contextlib.suppress(errors.DeletionPendingError, errors.WorkerRPCError):
        await deleting
    if await rig.service.lookups.find(ALONE, "Ann") is None:
        record = await rig.register()
    await rig.settled()
    assert rig.store.has_audio(record.audio_sha256)
    await rig.precompute()
