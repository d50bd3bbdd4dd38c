"""The encode thread rests after jobs that no request waits for, beside others only."""

import threading
import time

import pytest

from tests.unit.test_encode_queue import INLINE, QUEUED, Rig, wait_until
from vllm_tts_cache.model_executor.encode_queue import EncodeQueue
from vllm_tts_cache.model_executor.encode_rests import (
    FACTOR,
    LOOK_SECONDS,
    MAX_SECONDS,
    EncodeRests,
)

LONG = 1000.0


class Process:
    """The clocks of a process, whose other threads take ``busy`` cores."""

    def __init__(self, busy=0.0):
        self.wall = self.others = 5.0
        self.busy = busy

    def rests(self):
        return EncodeRests(lambda: self.wall, lambda: self.others, lambda: 0.0)

    def pass_by(self, seconds):
        self.wall += seconds
        self.others += self.busy * seconds

    def rested(self, rests):
        """How long a rest takes of one who asks again when told to."""
        began = self.wall
        while (seconds := rests.seconds()) > 0.0:
            assert seconds <= LOOK_SECONDS
            self.pass_by(seconds)
        return self.wall - began


@pytest.mark.parametrize(
    ("took", "busy", "seconds"),
    [(1.0, 1.0, FACTOR), (1.0, 0.01, 0.0), (60.0, 0.8, MAX_SECONDS), (0.0, 1.0, 0.0)],
)
def test_a_rest_is_as_long_as_others_need_it(took, busy, seconds):
    process = Process(busy)
    rests = process.rests()
    rests.begin()
    process.pass_by(took)
    rests.rest()
    assert process.rested(rests) == pytest.approx(seconds)


def test_a_rest_ends_when_nobody_computes_any_more():
    process = Process(busy=1.0)
    rests = process.rests()
    rests.begin()
    process.pass_by(4.0)
    rests.rest()
    process.pass_by(rests.seconds())
    assert rests.seconds() > 0.0
    process.busy = 0.0
    assert process.rested(rests) <= 2 * LOOK_SECONDS
    process.busy = 1.0
    assert rests.seconds() == 0.0


def test_a_thread_that_computes_is_seen_and_one_that_waits_is_not():
    rests, ended = EncodeRests(), threading.Event()
    rests.begin()
    ended.wait(0.2)
    rests.rest()
    assert rests.seconds() == 0.0
    # A machine that is busy with others may leave this process a tenth of a core.
    rests = EncodeRests(wall=time.process_time)
    other = threading.Thread(target=lambda: [None for _ in iter(ended.is_set, True)])
    other.start()
    rests.begin()
    before = time.process_time()
    wait_until(lambda: time.process_time() - before > 0.2)
    rests.rest()
    found = rests.seconds()
    ended.set()
    other.join()
    assert found > 0.0


@pytest.fixture
def process():
    return Process(busy=1.0)


@pytest.fixture
def rig(process):
    rig = Rig()
    rig.queue = EncodeQueue(
        rig.work, max_waiting_inline=64, clock=rig.clock, rests=process.rests()
    )
    yield rig
    rig.queue.close()
    assert rig.queue._thread is None or not rig.queue._thread.is_alive()


def rest(rig, process):
    """Have the thread rest, with a job behind it that no request waits for."""
    rig.work.gate.clear()
    rig.want("a")
    assert rig.work.entered.acquire(timeout=10)
    rig.want("next", lease=LONG)
    process.pass_by(4.0)
    rig.work.gate.set()
    wait_until(lambda: rig.queue.is_resting)


def test_what_nobody_waits_for_waits_for_the_rest_and_is_done_after_it(rig, process):
    rest(rig, process)
    assert rig.look("next").state is QUEUED
    assert rig.work.encoded == ["a"]
    process.pass_by(MAX_SECONDS)
    wait_until(lambda: rig.work.encoded == ["a", "next"])
    assert not rig.queue.is_resting


def test_what_nobody_waits_for_is_done_when_the_streams_have_ended(rig, process):
    rest(rig, process)
    process.busy = 0.0
    process.pass_by(2 * LOOK_SECONDS)
    wait_until(lambda: rig.work.encoded == ["a", "next"])


@pytest.mark.parametrize("how", [{"urgent": True}, {"segment": INLINE}])
def test_what_a_request_waits_for_is_done_within_the_rest(rig, process, how):
    rest(rig, process)
    rig.want("mine", **how)
    wait_until(lambda: rig.work.encoded == ["a", "mine"])
    assert rig.look("next").state is QUEUED


def test_a_key_that_another_process_has_for_a_request_ends_no_rest(rig, process):
    """Another server's long clip had this one encode all voices in a row."""
    rest(rig, process)
    rig.work.elsewhere.add("theirs")
    rig.want("theirs", urgent=True, lease=LONG)
    for _ in range(3):
        rig.clock.now += 1.0  # it may be looked at again
        time.sleep(LOOK_SECONDS)
    assert rig.work.encoded == ["a"]
    assert rig.look("next").state is QUEUED
    rig.work.elsewhere.clear()
    rig.clock.now += 1.0
    wait_until(lambda: rig.work.encoded == ["a", "theirs"])


def test_rests_are_counted_while_something_waits_for_their_end(rig, process):
    rest(rig, process)
    assert rig.queue.stats().rested_seconds == 0.0
    wait_until(lambda: rig.queue.stats().rested_seconds > 0.0)
    process.pass_by(MAX_SECONDS)
    wait_until(lambda: not rig.queue.stats().in_flight)
    before = rig.queue.stats().rested_seconds
    time.sleep(2 * LOOK_SECONDS)
    rig.want("urgent", urgent=True)
    wait_until(lambda: not rig.queue.stats().in_flight)
    assert rig.queue.stats().rested_seconds == before


def test_after_a_job_that_a_request_waits_for_there_is_none(rig):
    for name in "abc":
        rig.want(name, urgent=True)
    wait_until(lambda: rig.work.encoded == ["a", "b", "c"])


def test_a_request_that_joins_a_job_in_hand_spares_the_next_one_the_rest(rig, process):
    rig.work.gate.clear()
    rig.want("a")
    assert rig.work.entered.acquire(timeout=10)
    rig.want("a", urgent=True)
    rig.want("next")
    process.pass_by(4.0)
    rig.work.gate.set()
    wait_until(lambda: rig.work.encoded == ["a", "next"])


def test_an_errand_is_run_within_the_rest(rig, process):
    rest(rig, process)
    assert rig.queue.call(lambda: 7, timeout_seconds=10) == 7
