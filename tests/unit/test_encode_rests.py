"""The encode thread rests after jobs that no request waits for, beside others only."""

import threading
import time

import pytest

from tests.unit.test_encode_queue import INLINE, QUEUED, Rig, wait_until
from vllm_tts_cache.model_executor.encode_queue import EncodeQueue
from vllm_tts_cache.model_executor.encode_rests import MAX_SECONDS, EncodeRests

FOR_EVER = 3600.0


@pytest.mark.parametrize(
    ("took", "process", "thread", "seconds"),
    [
        (1.0, 1.9, 0.9, 2.0),  # another thread computed all the while
        (1.0, 1.0, 0.99, 0.0),  # nobody else did
        (60.0, 100.0, 50.0, MAX_SECONDS),
        (0.0, 0.0, 0.0, 0.0),
    ],
)
def test_a_rest_is_as_long_as_others_need_it(took, process, thread, seconds):
    now = {"wall": 5.0, "process": 7.0, "thread": 3.0}
    rests = EncodeRests(*(lambda name=name: now[name] for name in now))
    rests.begin()
    now["wall"] += took
    now["process"] += process
    now["thread"] += thread
    assert rests.seconds() == seconds


def test_a_thread_that_computes_is_seen_and_one_that_waits_is_not():
    rests, ended = EncodeRests(), threading.Event()
    rests.begin()
    ended.wait(0.05)
    assert rests.seconds() == 0.0
    other = threading.Thread(target=lambda: [None for _ in iter(ended.is_set, True)])
    other.start()
    rests.begin()
    before = time.process_time()
    wait_until(lambda: time.process_time() - before > 0.2)
    found = rests.seconds()
    ended.set()
    other.join()
    assert found > 0.0


class Tired(EncodeRests):
    """Rests for ever, which must end when somebody waits."""

    def seconds(self):
        return FOR_EVER


@pytest.fixture
def rig():
    rig = Rig()
    rig.queue = EncodeQueue(
        rig.work, max_waiting_inline=64, clock=rig.clock, rests=Tired()
    )
    yield rig
    rig.queue.close()
    assert rig.queue._thread is None or not rig.queue._thread.is_alive()


def rest(rig):
    """Have the thread rest, with a job behind it that no request waits for."""
    rig.work.gate.clear()
    rig.want("a")
    assert rig.work.entered.acquire(timeout=10)
    rig.want("next")
    rig.work.gate.set()
    wait_until(lambda: rig.queue.num_finished == 1)


def test_what_nobody_waits_for_waits_for_the_rest(rig):
    rest(rig)
    assert rig.look("next").state is QUEUED
    assert rig.work.encoded == ["a"]


@pytest.mark.parametrize("how", [{"urgent": True}, {"segment": INLINE}])
def test_a_request_that_waits_ends_the_rest(rig, how):
    rest(rig)
    rig.want("mine", **how)
    wait_until(lambda: "mine" in rig.work.encoded)


def test_after_a_job_that_a_request_waits_for_there_is_none(rig):
    for name in "abc":
        rig.want(name, urgent=True)
    wait_until(lambda: rig.work.encoded == ["a", "b", "c"])


def test_a_request_that_joins_a_job_in_hand_spares_the_next_one_the_rest(rig):
    rig.work.gate.clear()
    rig.want("a")
    assert rig.work.entered.acquire(timeout=10)
    rig.want("a", urgent=True)
    rig.want("next")
    rig.work.gate.set()
    wait_until(lambda: rig.work.encoded == ["a", "next"])


def test_an_errand_ends_the_rest(rig):
    rest(rig)
    assert rig.queue.call(lambda: 7, timeout_seconds=10) == 7
