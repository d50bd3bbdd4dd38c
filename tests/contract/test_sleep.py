"""vLLM's sleep mode and the encode thread, over the host's own worker class."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.device_allocator import cumem
from vllm.v1.executor.abstract import Executor
from vllm_omni.worker.gpu_ar_worker import GPUARWorker

from tests.allocator import Allocator
from tests.in_process_workers import QUEUED, prepare, wanted
from vllm_tts_cache.model_executor import rpc_methods
from vllm_tts_cache.model_executor.decoder_states import DecoderState, DecoderStates
from vllm_tts_cache.speaker.wire import JobState


@pytest.fixture
def allocator(monkeypatch):
    allocator = Allocator()
    instance = staticmethod(lambda: allocator)
    monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", instance)
    options = {"synchronize": lambda: None, "get_current_memory_usage": lambda _: 0}
    platform = SimpleNamespace(**options)
    monkeypatch.setattr("vllm_omni.worker.base.current_omni_platform", platform)
    return allocator


@pytest.fixture
def executor(speakers):
    """vLLM's executor of one worker of the host, whose model is a talker of ours."""
    rpc_methods.install()
    worker: Any = object.__new__(GPUARWorker)
    worker.rank, worker.device = 0, "cpu"
    talker = SimpleNamespace(tts_cache_speakers=speakers)
    worker.model_runner = SimpleNamespace(model=talker)

    class OneWorker:
        worker: Any
        is_sleeping = property(lambda self: bool(self.sleeping_tags))
        is_sleeping = is_sleeping.setter(lambda self, _: None)  # as 0.30 does
        sleep, wake_up = Executor.sleep, Executor.wake_up
        discard = getattr(Executor, "discard", None)  # since 0.32

        def collective_rpc(self, name, args=(), kwargs=None):
            return getattr(self.worker, name)(*args, **(kwargs or {}))

    executor: Any = OneWorker()
    executor.worker, executor.sleeping_tags = worker, set()
    return executor


def state(speakers, ref):
    return wanted(speakers, ref, ["codec"], urgent=True)["codec"].state


@pytest.mark.parametrize("level", [1, 2])
def test_a_worker_that_slept_encodes_again(executor, allocator, speakers, ref, level):
    executor.sleep(level)
    assert state(speakers, ref) is JobState.FAILED
    executor.wake_up()
    prepare(speakers, ref, ["codec"])
    assert state(speakers, ref) is JobState.READY
    offloaded = ("weights",) if level == 1 else ()
    assert allocator.calls == [("sleep", offloaded), ("wake_up", None)]


def test_with_its_weights_alone_it_is_not_awake(executor, allocator, speakers, ref):
    executor.sleep(1)
    executor.wake_up(["weights"])
    assert state(speakers, ref) is JobState.FAILED
    executor.wake_up(["kv_cache"])
    assert state(speakers, ref) is QUEUED


@pytest.mark.skipif(not hasattr(Executor, "discard"), reason="since 0.32")
def test_nothing_is_encoded_without_the_kv_cache(executor, allocator, speakers, ref):
    executor.worker._sleep_mode_backend = allocator
    executor.discard(("kv_cache",))
    assert state(speakers, ref) is JobState.FAILED
    executor.wake_up(["kv_cache"])
    assert state(speakers, ref) is QUEUED
    assert [name for name, _ in allocator.calls] == ["discard", "wake_up"]


def test_a_sleep_that_fails_is_none(executor, allocator, speakers, ref):
    allocator.error = RuntimeError("cumem allocator is not available")
    with pytest.raises(RuntimeError, match="cumem"):
        executor.sleep(1)
    assert state(speakers, ref) is QUEUED


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_decoder_has_no_state_and_makes_it_anew(executor, allocator, level):
    states = DecoderStates(max_bytes=100)
    decoder = SimpleNamespace(tts_cache_decoder_states=states)
    executor.worker.model_runner = SimpleNamespace(model=decoder)
    states.get("a" * 64, "d", lambda: DecoderState("state", 40))
    executor.sleep(level)
    assert (states.stats(0).states, states.stats(0).bytes) == (0, 0)
    executor.wake_up()
    states.get("a" * 64, "d", lambda: DecoderState("state", 40))
    assert states.stats(0).states == 1
    assert allocator.asked == ["sleep", "wake_up"]


def test_a_worker_of_another_model_sleeps_as_it_did(executor, allocator):
    executor.worker.model_runner = SimpleNamespace(model=object())
    executor.sleep(1)
    executor.wake_up()
    assert allocator.asked == ["sleep", "wake_up"]
