"""Who is waited for where no lock tells who is alive."""

import os
import signal
import time
from contextlib import ExitStack

import pytest

from tests.encoding_samples import is_free, make_key
from tests.lease_times import SECONDS, delete_participants, shift, silent_for
from tests.store_samples import address, opened, register, register_vector
from tests.waiting import wait_until
from vllm_tts_cache import config
from vllm_tts_cache.catalogue import deletions, leases, schema
from vllm_tts_cache.model_executor.encode_work import LeasedTurns

pytestmark = pytest.mark.postgresql


@pytest.fixture
def alone(monkeypatch):
    """Whoever takes part renews nothing by itself; renewals go on all the same."""
    monkeypatch.setattr(leases, "RENEW_SECONDS", 3600.0)


@pytest.fixture
def ended(open_here, monkeypatch, alone):
    """Ends the leases of all who take part, as if others had renewed theirs."""
    monkeypatch.setattr(leases, "GAP_SECONDS", 60.0)  # nobody does, while a test runs
    store = open_here()

    def end(seconds: float = 1.0) -> None:
        with store.database.write() as db:
            silent_for(db, SECONDS + seconds)

    return end


def participants(store):
    with store.database.read() as db:
        return set(deletions.participants(db))


def deletion_of(store, name="Ann"):
    deletion = store.registrations.delete(name)
    store.remove_files(deletion)
    return deletion


def test_who_is_silent_is_not_waited_for_and_confirms_later(store, open_here, ended):
    other = open_here()
    register(store, "Ann")
    other.participants.join()
    deletion = deletion_of(store)
    assert store.progress("Ann").waiting_for == 1
    assert store.participants.num_alive() == 1
    ended()
    assert store.progress("Ann").is_finished
    assert store.participants.num_alive() == 0
    store.acknowledge(deletion.id)
    assert store.progress("Ann") is None
    # It has been told nothing of it yet, and is before it confirms anything.
    (missed,) = other.participants.deletions_to_confirm()
    assert (missed.id, missed.audio_sha256) == (deletion.id, address())
    other.participants.confirm(missed.id)
    with store.database.read() as db:
        assert db.execute(schema.deletion.select()).all() == []


def pending(store, name="Ann"):
    return store.progress(name).waiting_for


def test_after_a_restart_all_have_time_to_come_back(store, open_here, alone, postgres):
    other = open_here()
    register(store, "Ann")
    other.participants.join()
    postgres.stop()
    postgres.start()
    deletion = deletion_of(store)
    assert pending(store) == 1
    assert other.participants.deletions_to_confirm() == [deletion]


def test_after_any_outage_all_have_time_to_come_back(store, open_here, alone):
    """The server was not restarted: a standby took its place, or nobody reached it."""
    other, first = open_here(), open_here()
    register(store, "Ann")
    other.participants.join()
    with store.database.write() as db:
        shift(db, 60)
    deletion = deletion_of(store)
    assert pending(store) == 1  # whoever asks has not renewed either
    first.participants.join()  # the first one that is back
    assert pending(store) == 1
    with store.database.write() as db:
        silent_for(db, SECONDS - 2)
    assert pending(store) == 1
    with store.database.write() as db:
        silent_for(db, 3)
    assert pending(store) == 0
    assert other.participants.deletions_to_confirm() == [deletion]


@pytest.mark.parametrize("seconds", [leases.LOST_SECONDS + 60, -3600.0])
def test_a_set_clock_ends_no_lease(store, open_here, alone, monkeypatch, seconds):
    """The first one that renewed by it deleted all the others."""
    monkeypatch.setattr("vllm_tts_cache.store.participants.DELETE_LOST_SECONDS", 0.0)
    first, second = open_here(), open_here()
    register(store, "Ann")
    mine = first.participants.join()
    second.participants.join()
    with store.database.write() as db:
        silent_for(db, 4 * leases.LOST_SECONDS)  # they have been at work for long
        for one in participants(store):
            assert leases.renew(db, one)
    with store.database.write() as db:
        shift(db, seconds)
    deletion = deletion_of(store)
    for _ in range(2):
        assert pending(store) == 2
        for one in (first, second):
            one.participants.delete_dead()
            assert one.participants.deletions_to_confirm() == [deletion]
        with store.database.write() as db:
            assert leases.renew(db, mine)  # and the other one is a moment later


SHORT = {"catalogue_grace_seconds": 1.0}


@pytest.fixture
def short(monkeypatch):
    """A lease that is renewed much oftener than it has to be."""
    monkeypatch.setattr(config, "MIN_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.05)


def test_a_lease_lives_on_while_its_process_is_busy(store, short):
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        opened(store.directory, catalogue_grace_seconds=1.0).participants.join()
        os.write(writer, b".")
        signal.pause()
    assert os.read(reader, 1) == b"."
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        assert store.participants.num_alive() == 1
        time.sleep(0.05)
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: not store.participants.num_alive())
    os.kill(child, signal.SIGCONT)
    wait_until(store.participants.num_alive)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_until(lambda: not store.participants.num_alive())


def test_whoever_was_deleted_joins_anew_once_it_notices(store, open_here, monkeypatch):
    """It asked for a restart, and took deletions for finished that it had missed."""
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.5)
    other = open_here()
    register(store, "Ann")
    register(store, "Bob", 1)
    other.participants.join()
    deletion_of(store)
    delete_participants(store)
    assert participants(store) == set()
    assert store.progress("Ann").is_finished
    assert pending(other) == 1
    wait_until(lambda: other.participants.missed() is not None)
    assert other.participants.standing().seconds == 0  # its last rows may be of Ann
    assert pending(other) == 1
    other.participants.has_deleted_all(other.participants.missed())
    assert other.participants.missed() is None
    assert other.progress("Ann").is_finished
    assert other.participants.deletions_to_confirm() == []
    deletion = deletion_of(store, "Bob")
    assert other.participants.deletions_to_confirm() == [deletion]
    assert pending(store, "Bob") == 1


def test_who_joins_anew_confirms_files_that_it_may_read(store, open_here, monkeypatch):
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.3)
    other = open_here()
    register(store, "Ann")
    other.participants.join()
    deletion = store.registrations.delete("Ann")
    delete_participants(store)
    wait_until(lambda: other.participants.missed() is not None)
    store.remove_files(deletion)
    assert other.participants.deletions_to_confirm() == [deletion]


def test_the_clock_of_a_machine_says_nothing(store, open_here, monkeypatch):
    other = open_here()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    other.participants.join()
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    assert store.participants.num_alive() == 1


def test_a_lease_survives_connections_that_are_cut(store, open_here, postgres, short):
    other = open_here(**SHORT)
    register(store, "Ann")
    other.participants.join()
    deletion = deletion_of(store)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        postgres.cut()
        time.sleep(0.3)
    assert store.participants.num_alive() == 1
    assert other.participants.deletions_to_confirm() == [deletion]


def test_after_hours_of_outage_nobody_is_deleted(store, open_here, monkeypatch):
    """The first one that was back deleted them all, itself included, for good."""
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.3)
    first, second = open_here(), open_here()
    for each in (first, second):
        each.participants.join()
    with store.database.write() as db:
        shift(db, leases.LOST_SECONDS + 60)
    first.recover()
    assert first.participants.deletions_to_confirm() == []
    third = open_here()
    third.participants.join()
    time.sleep(1.0)  # each has renewed its lease
    for each in (first, second, third):
        assert each.participants.deletions_to_confirm() == []
        assert each.participants.missed() is None
    assert store.participants.num_alive() == 3


def test_whoever_never_comes_back_is_deleted_in_time(store, open_here, monkeypatch):
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.3)
    monkeypatch.setattr("vllm_tts_cache.store.participants.DELETE_LOST_SECONDS", 0.1)
    here = open_here()
    here.participants.join()
    with store.database.write() as db:
        deletions.join(db, "gone")
        until = leases.NOW - 2 * leases.LOST_SECONDS
        gone = {"participant_id": "gone", "until": until, "seconds": 60}
        db.execute(schema.lease.insert().values(**gone))
    here.participants.delete_dead()
    assert "gone" in participants(store)  # renewals have not gone on for so long
    with store.database.write() as db:
        began_at = leases.NOW - 2 * leases.LOST_SECONDS
        db.execute(schema.renewals.update().values(began_at=began_at))
    until = time.monotonic() + 60
    while "gone" in participants(store):
        here.participants.delete_dead()
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_deleted_embedding_is_confirmed_as_well(store, open_here):
    other = open_here()
    other.participants.join()
    vec = register_vector(store, "Vec")
    deletion = deletion_of(store, "Vec")
    assert deletion in other.participants.deletions_to_confirm()
    assert deletion.public_id == vec.speaker_id


def test_a_turn_to_encode_ends_at_a_fixed_time(store, open_here):
    """What could not be given back was renewed with each later turn, for ever."""
    turns = [LeasedTurns(each.database) for each in (store, open_here())]
    key, other_key = make_key("a"), make_key("b")
    with turns[0].turn(key):
        assert [is_free(each, key) for each in turns] == [False, False]
    assert is_free(turns[1], key)
    lost = ExitStack()  # as if it could not give it back
    assert lost.enter_context(turns[0].turn(key))
    with turns[0].turn(other_key), store.database.write() as db:
        db.execute(schema.encode_turn.update().values(until=leases.NOW - 1.0))
    with turns[1].turn(key):
        lost.close()  # it ends after all, and takes nothing from the next
        assert not is_free(turns[0], key)
