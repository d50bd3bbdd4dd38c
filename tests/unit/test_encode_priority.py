"""The kernel is asked how nice a thread is; nothing here measures a time."""

import os
import resource
import subprocess
import sys
import threading

import pytest
import torch

from tests.encoding_samples import make_encoding
from vllm_tts_cache.model_executor.encode_device import ENCODE_NICE, EncodeDevice

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
    assert nice_while_encoding("cpu", num_jobs=2) == [ENCODE_NICE, ENCODE_NICE]


def test_a_scheduler_call_that_is_refused_costs_no_encode(monkeypatch):
    def refuse(*_):
        raise PermissionError("setpriority")

    monkeypatch.setattr(os, "setpriority", refuse)
    assert nice_while_encoding("cpu") == [nice_of(threading.get_native_id())]


def test_a_thread_that_takes_the_others_place_is_as_nice():
    on_device, seen = EncodeDevice(torch.device("cpu")), []

    def encode():
        seen.append(nice_of(threading.get_native_id()))
        return make_encoding()

    for _ in range(2):
        thread = threading.Thread(target=on_device.run, args=(encode, 0))
        thread.start()
        thread.join(WAIT)
    assert seen == [ENCODE_NICE, ENCODE_NICE]


def test_only_the_encode_thread_is_nicer():
    own = threading.get_native_id()
    before = nice_of(own)
    nice_while_encoding("cpu")
    assert nice_of(own) == before


def test_an_accelerators_encode_thread_keeps_its_priority():
    assert nice_while_encoding("meta") == [nice_of(threading.get_native_id())]


PRELUDE = """
import os, threading
from vllm_tts_cache.model_executor.encode_device import give_way

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
    assert printed_by(program, preexec_fn=no_nice_limit) == [str(ENCODE_NICE)]


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
    assert set(printed_by(program, env=environ)) == {str(ENCODE_NICE)}
