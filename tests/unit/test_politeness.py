"""The kernel is asked what class a thread has; nothing here measures a time."""

import os
import resource
import subprocess
import sys
import threading
import time

import pytest
import torch

from tests.encoding_samples import make_encoding, make_key
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.model_executor import politeness
from vllm_tts_cache.model_executor.encode_queue import EncodeJob, EncodeQueue

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_IDLE"), reason="the scheduler's classes are Linux"
)

WAIT = 60.0
NEVER, AT_ONCE = 3600.0, 0.001
IDLE = ("idle", 0)
needs_return = pytest.mark.skipif(
    not politeness._can_return(0), reason="nobody leaves SCHED_IDLE here"
)


def standing(thread_id):
    name = {os.SCHED_IDLE: "idle", os.SCHED_OTHER: "normal"}
    nice = os.getpriority(os.PRIO_PROCESS, thread_id)
    policy = name[os.sched_getscheduler(thread_id)]
    return policy, nice if policy == "normal" else 0


class Encoder:
    """Notes its thread's standing when it begins; goes on when the gate is open."""

    def __init__(self):
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.began_as = []

    def __call__(self, _job):
        self.thread_id = threading.get_native_id()
        self.began_as.append(standing(self.thread_id))
        self.entered.release()
        assert self.gate.wait(WAIT)
        return make_encoding()

    def rises_to(self, expected):
        until = time.monotonic() + WAIT
        while standing(self.thread_id) != expected:
            assert time.monotonic() < until, standing(self.thread_id)
            time.sleep(0.001)
        return True


@pytest.fixture
def encoder():
    encoder = Encoder()
    yield encoder
    encoder.gate.set()


def queue(encoder, yield_seconds, device="cpu"):
    return EncodeQueue(encoder, torch.device(device), yield_seconds=yield_seconds)


def submit(jobs, number=0):
    key = make_key(number)
    return jobs.submit(EncodeJob(key=key, encoder_name="a", segment=Segment.REGISTERED))


@needs_return
def test_a_job_takes_what_decoding_leaves_over(encoder):
    submit(queue(encoder, NEVER))
    assert encoder.entered.acquire(timeout=WAIT)
    assert encoder.began_as == [IDLE]
    assert standing(encoder.thread_id) == IDLE


@needs_return
def test_a_job_that_runs_too_long_is_raised_while_it_runs(encoder):
    submit(queue(encoder, AT_ONCE))
    assert encoder.entered.acquire(timeout=WAIT)
    assert encoder.rises_to(("normal", 0))


@needs_return
def test_the_first_step_up_is_the_nicest_normal_thread(encoder, monkeypatch):
    seen, raised = [], politeness._normal

    def note(thread_id, nice):
        raised(thread_id, nice)
        seen.append(standing(thread_id))

    monkeypatch.setattr(politeness, "_normal", note)
    submit(queue(encoder, AT_ONCE))
    assert encoder.entered.acquire(timeout=WAIT)
    assert encoder.rises_to(("normal", 0))
    assert seen[-2:] == [("normal", 19), ("normal", 0)]


@needs_return
def test_the_job_after_a_raised_one_gives_way_again():
    began_as = []

    def encode(job):
        encoder.thread_id = threading.get_native_id()
        began_as.append(standing(encoder.thread_id))
        if job.key == make_key(0):
            assert encoder.rises_to(("normal", 0))
        return make_encoding()

    encoder = Encoder()
    jobs = queue(encode, 0.2)
    submit(jobs, 0).result(WAIT)
    submit(jobs, 1).result(WAIT)
    assert began_as == [IDLE, IDLE]
    assert standing(encoder.thread_id) == IDLE


@needs_return
def test_only_the_encode_thread_gives_way(encoder):
    submit(queue(encoder, NEVER))
    assert encoder.entered.acquire(timeout=WAIT)
    others = [t for t in threading.enumerate() if t.native_id != encoder.thread_id]
    assert len(others) >= 2  # this one and the one that watches
    for thread in others:
        if thread.name != "tts-cache-encode":  # of other tests
            assert standing(thread.native_id) == ("normal", 0)


def test_an_accelerators_thread_keeps_its_priority(encoder):
    submit(queue(encoder, AT_ONCE, device="meta"))
    assert encoder.entered.acquire(timeout=WAIT)
    assert encoder.began_as == [standing(threading.get_native_id())]


UNPRIVILEGED = """
import os, threading
from vllm_tts_cache.model_executor.politeness import Politeness
os.setgroups([]); os.setgid(65534); os.setuid(65534)
def run():
    own = threading.get_native_id()
    with Politeness(3600).job():
        print(os.sched_getscheduler(own) == os.SCHED_IDLE)
    print(os.getpriority(os.PRIO_PROCESS, own), os.getpriority(os.PRIO_PROCESS, 0))
thread = threading.Thread(target=run)
thread.start()
thread.join()
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


def no_nice_limit():
    resource.setrlimit(resource.RLIMIT_NICE, (0, 0))


@pytest.mark.skipif(
    getattr(os, "geteuid", lambda: 1)() != 0, reason="gives its privileges up"
)
def test_without_privileges_it_never_enters_what_it_cannot_leave():
    nice = politeness._FIXED_NICE
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=no_nice_limit,
    )
    assert (done.stdout, done.stderr) == (f"False\n{nice} {nice}\n0\n", "")
