"""torch's own functions are replaced by those of a GPU that a test describes."""

import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.cli_runs import printed_by
from tests.encoding_samples import assert_same, make_encoding
from tests.in_process_workers import clip
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.model_executor.encode_work import (
    MARGIN_BYTES,
    EncodeDevice,
    capture_beside_encodes,
)
from vllm_tts_cache.speaker.precision import NICE, cpu_name
from vllm_tts_cache.speaker.reference import MemoryNeed
from vllm_tts_cache.store.encoding import ComputedOn

MIB, GIB = 1024**2, 1024**3
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
META = torch.device("meta")
ENCODING = make_encoding()
AUDIO = clip(0)


class Gpu:
    """What torch says of a GPU, in bytes.

    Its allocator has those that are ``unused``, and can give back all but the
    ``pinned`` ones; what is in use ``elsewhere`` it does not have.
    """

    def __init__(self, monkeypatch):
        self.free, self.unused, self.pinned = 8 * GIB, 0, 0
        self.elsewhere, self.can_tidy = 0, True
        self.calls, self.streams = [], []
        for name in (
            *("mem_get_info", "memory_reserved", "memory_allocated", "empty_cache"),
            *("set_device", "Stream", "stream", "get_device_name"),
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def mem_get_info(self, device):
        assert device == GPU
        return self.free, 80 * GIB

    def memory_reserved(self, device):
        assert device == GPU
        return 5 * GIB + self.unused

    def memory_allocated(self, device):
        assert device == GPU
        return 5 * GIB + self.elsewhere

    def empty_cache(self):
        self.calls.append("tidy")
        if not self.can_tidy:
            raise RuntimeError("invalid argument")
        self.free += self.unused - self.pinned
        self.unused = self.pinned

    def get_device_name(self, device):
        assert device == GPU
        return "A card of 1996"

    def set_device(self, device):
        self.calls.append(device)

    def Stream(self, device):
        self.streams.append(device)
        return len(self.streams)

    @contextmanager
    def stream(self, stream):
        self.calls.append(f"on stream {stream}")
        yield

    @property
    def num_tidied(self):
        return self.calls.count("tidy")


class Encoder:
    """Runs out of memory so many times, as torch or as an encoder says it."""

    name, fingerprint, need = "encoder", "f" * 64, MemoryNeed(fixed_bytes=GIB)

    def __init__(self, num_failures=0, *, wrapped=False):
        self.num_failures, self.wrapped = num_failures, wrapped
        self.seen = []

    def encode(self, audio):
        inference = torch.is_inference_mode_enabled()
        self.seen.append((inference, torch.get_num_threads(), own_nice()))
        if len(self.seen) <= self.num_failures:
            error = torch.OutOfMemoryError("CUDA out of memory")
            if self.wrapped:
                raise EncodeError("codec encoder: CUDA out of memory") from error
            raise error
        return ENCODING


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def run(encoder, device=GPU):
    """Encode on a thread of its own, because that thread is changed."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(EncodeDevice(device).run, encoder, AUDIO).result(60)


# -------- memory


# What a GPU has -> how often the allocator is tidied for an encode of one GiB.
ROOM = {
    "to spare": ({"free": GIB + MARGIN_BYTES}, 0),
    "once the allocator gives back": ({"free": GIB // 2, "unused": GIB}, 1),
    # As with sleep mode, where the weights are in a pool that it knows nothing of.
    "in an allocator that does not know what it has": (
        {"free": GIB // 2, "unused": GIB, "elsewhere": 4 * GIB},
        1,
    ),
}
# -> what is said of it: 1280 MiB are wanted, with the margin.
NO_ROOM = {
    "one byte too few": ({"free": GIB + MARGIN_BYTES - 1}, "1280 MiB are free"),
    "kept by CUDA graphs": (
        {"free": GIB // 2, "unused": GIB, "pinned": GIB},
        "512 MiB are free",
    ),
    "given back by nobody": (
        {"free": GIB // 2, "unused": GIB, "can_tidy": False},
        "512 MiB are free",
    ),
}


@pytest.mark.parametrize("has, num_tidied", ROOM.values(), ids=ROOM)
def test_where_there_is_room_it_encodes_once(gpu, has, num_tidied):
    vars(gpu).update(has)
    assert_same(run(encoder := Encoder()), ENCODING)
    assert (len(encoder.seen), gpu.num_tidied) == (1, num_tidied)


@pytest.mark.parametrize("has, said", NO_ROOM.values(), ids=NO_ROOM)
def test_without_room_it_refuses_before_it_starts_and_names_the_setting(gpu, has, said):
    vars(gpu).update(has)
    encoder, told = Encoder(), f"1024 MiB .* {said}; .*gpu_memory_utilization"
    with pytest.raises(EncodeError, match=told):
        run(encoder)
    assert len(encoder.seen) == 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_out_of_memory_it_tidies_tries_once_more_and_names_the_setting(gpu, wrapped):
    once, always = (Encoder(times, wrapped=wrapped) for times in (1, 2))
    assert_same(run(once), ENCODING)
    assert (len(once.seen), gpu.num_tidied) == (2, 1)
    with pytest.raises(EncodeError, match="gpu_memory_utilization"):
        run(always)
    assert len(always.seen) == 2


@pytest.mark.parametrize(
    "device, name", [(CPU, cpu_name()), (GPU, "A card of 1996"), (META, "meta")]
)
def test_an_encoding_says_which_chip_and_torch_computed_it(gpu, device, name):
    assert run(Encoder(), device).origin == ComputedOn(
        device=device.type, device_name=name, torch_version=str(torch.__version__)
    )


# -------- the thread


def test_a_thread_gets_its_device_and_a_stream_once_and_encodes_on_it(gpu):
    on_device = EncodeDevice(GPU)

    def twice():
        on_device.run(Encoder(), AUDIO)
        with on_device.entered():
            gpu.calls.append("loaded")

    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(twice).result(60)
    first = [GPU, "on stream 1", "on stream 1", "loaded"]
    second = [GPU, "on stream 2", "on stream 2", "loaded"]
    assert gpu.calls == first + second
    assert gpu.streams == [GPU, GPU]


def own_nice():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("device", [CPU, GPU, META])
def test_every_device_is_encoded_for_on_one_cpu_thread_without_gradients(gpu, device):
    """On a CPU the thread is nicer than those that decode, and not with each job."""
    before, on_device, encoder = own_nice(), EncodeDevice(device), Encoder()
    with ThreadPoolExecutor(1) as thread:
        for _ in range(2):
            thread.submit(on_device.run, encoder, AUDIO).result(60)
    nice = max(NICE, before) if device == CPU else before
    assert encoder.seen == [(True, 1, nice)] * 2
    assert not torch.is_inference_mode_enabled()
    assert own_nice() == before


def test_no_other_thread_computes_on_fewer_cpu_threads_for_it():
    program = """
import threading, torch
from vllm_tts_cache.model_executor.encode_work import EncodeDevice

def on_a_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()

def encode():
    with EncodeDevice(torch.device("cpu")).entered():
        print(torch.get_num_threads())

on_a_thread(encode)  # before this one has asked torch for anything
print(torch.get_num_threads())
on_a_thread(lambda: print(torch.get_num_threads()))
"""
    assert printed_by(program, OMP_NUM_THREADS="2").split() == ["1", "2", "2"]


def test_a_core_that_is_kept_busy_is_not_idle():
    on_device, cores = EncodeDevice(CPU), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        on_device.num_idle_cores()
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            pass
        assert on_device.num_idle_cores() < 0.5
        assert EncodeDevice(META).num_idle_cores() == math.inf, "it takes none"
    finally:
        os.sched_setaffinity(0, cores)


def test_graphs_are_captured_so_that_an_encode_beside_them_may_allocate(monkeypatch):
    """By torch's default an allocation of any thread spoils a capture."""
    captured = []

    def init(self, graph, pool=None, stream=None, capture_error_mode="global"):
        captured.append(capture_error_mode)

    monkeypatch.setattr(torch.cuda.graph, "__init__", init)
    capture_beside_encodes()
    capture_beside_encodes()  # once is enough
    graph: Any = None
    torch.cuda.graph(graph)
    torch.cuda.graph(graph, None, None, "relaxed")
    torch.cuda.graph(graph, capture_error_mode="global")  # whoever says so means it
    assert captured == ["thread_local", "relaxed", "global"]
