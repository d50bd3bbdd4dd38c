"""The kernel is asked how nice a thread is; nothing here measures a time."""

import os
import resource
import subprocess
import sys
import threading

import pytest
import torch

from tests.encoding_samples import make_encoding
from vllm_tts_cache.entrypoints.executors import BoundedExecutor
from vllm_tts_cache.model_executor.encode_device import EncodeDevice
from vllm_tts_cache.thread_priority import NICE

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has nice threads"
)

WAIT = 60.0


def nice_of(thread_id):
    return os.getpriority(os.PRIO_PROCESS, thread_id)


def nice_while_encoding(device, num_jobs=1):
    """How nice the encode thread was in each job."""
    seen = []

    def encode():
        seen.append(nice_of(threading.get_native_id()))
        return make_encoding()

    def run():
        for _ in range(num_jobs):
            on_device.run(encode, 0)

    on_device = EncodeDevice(torch.device(device))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT)
    return seen


def test_every_encode_on_a_cpu_is_nicer_than_decoding():
    assert nice_while_encoding("cpu", num_jobs=2) == [NICE, NICE]


def test_it_is_scheduled_like_other_threads_all_the_same():
    """SCHED_IDLE, and the GIL with it: a step of 2 ms beside it came 81 ms late."""
    policies = []

    def encode():
        policies.append(os.sched_getscheduler(threading.get_native_id()))
        return make_encoding()

    on_device = EncodeDevice(torch.device("cpu"))
    thread = threading.Thread(target=on_device.run, args=(encode, 0))
    thread.start()
    thread.join(WAIT)
    assert policies == [os.SCHED_OTHER]


@pytest.mark.parametrize("call", ["getpriority", "setpriority"])
def test_a_scheduler_call_that_is_refused_costs_no_encode(monkeypatch, call):
    seen = []

    def refuse(*_):
        raise PermissionError(call)

    monkeypatch.setattr(os, call, refuse)
    on_device = EncodeDevice(torch.device("cpu"))
    thread = threading.Thread(
        target=on_device.run, args=(lambda: seen.append(1) or make_encoding(), 0)
    )
    thread.start()
    thread.join(WAIT)
    assert seen == [1]


def test_a_thread_that_takes_the_others_place_is_as_nice():
    on_device, seen = EncodeDevice(torch.device("cpu")), []

    def encode():
        seen.append(nice_of(threading.get_native_id()))
        return make_encoding()

    for _ in range(2):
        thread = threading.Thread(target=on_device.run, args=(encode, 0))
        thread.start()
        thread.join(WAIT)
    assert seen == [NICE, NICE]


def test_only_the_encode_thread_is_nicer():
    own = threading.get_native_id()
    before = nice_of(own)
    nice_while_encoding("cpu")
    assert nice_of(own) == before


def test_an_accelerators_encode_thread_keeps_its_priority():
    assert nice_while_encoding("meta") == [nice_of(threading.get_native_id())]


@pytest.mark.parametrize("gives_way", [True, False])
async def test_threads_of_an_executor_are_nicer_if_that_was_asked_for(gives_way):
    own = nice_of(threading.get_native_id())
    threads = BoundedExecutor(
        "too much", num_threads=2, max_waiting=0, gives_way=gives_way
    )
    seen = await threads.run(lambda: nice_of(threading.get_native_id()))
    threads.shutdown()
    assert seen == (max(NICE, own) if gives_way else own)


PRELUDE = """
import os, threading
from vllm_tts_cache.thread_priority import give_way

def nice_of(thread_id):
    return os.getpriority(os.PRIO_PROCESS, int(thread_id))

def own():
    return nice_of(threading.get_native_id())

def on_a_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
"""


def printed_by(program, **options):
    """What a program of its own printed; ``on_a_thread`` runs a function on one."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    assert done.stderr == ""
    return done.stdout.split()


def no_nice_limit():
    resource.setrlimit(resource.RLIMIT_NICE, (0, 0))


@pytest.mark.skipif(
    getattr(os, "geteuid", lambda: 1)() != 0, reason="gives its privileges up"
)
def test_it_needs_no_privileges():
    program = """
os.setgroups([]); os.setgid(65534); os.setuid(65534)
on_a_thread(lambda: (give_way(), print(own())))
"""
    assert printed_by(program, preexec_fn=no_nice_limit) == [str(NICE)]


def test_a_process_that_is_nicer_already_stays_so():
    program = "os.nice(15); on_a_thread(lambda: (give_way(), print(own())))"
    expected = min(nice_of(0) + 15, 19)
    assert printed_by(program) == [str(expected)]


def test_the_threads_that_compute_for_it_are_as_nice():
    program = """
import torch
torch.randn(1000, 1000) @ torch.randn(1000, 1000)  # the main thread's team
def encode():
    before = set(os.listdir("/proc/self/task"))
    give_way()
    torch.randn(1000, 1000) @ torch.randn(1000, 1000)
    print(*(nice_of(tid) for tid in set(os.listdir("/proc/self/task")) - before))
on_a_thread(encode)
"""
    environ = {**os.environ, "OMP_NUM_THREADS": "2"}
    assert set(printed_by(program, env=environ)) == {str(NICE)}
