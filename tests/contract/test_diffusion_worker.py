"""Our methods on the host's diffusion worker, by each of its executors.

The classes on both ends are the host's; what lies between two processes is stood in
for, and what crosses it is pickled as there.
"""

import pickle
import queue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor
from vllm_omni.diffusion.executor.uniproc_executor import UniProcDiffusionExecutor
from vllm_omni.diffusion.worker import diffusion_worker
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

from tests.allocator import Allocator
from tests.contract.test_sleep import state
from tests.in_process_workers import across_processes, wait_until_idle, want_call
from vllm_tts_cache.model_executor import rpc_methods
from vllm_tts_cache.speaker import rpc_client, wire
from vllm_tts_cache.speaker.wire import JobState


def worker_of(pipeline):
    """The host's worker as its executors have it, without a device."""
    rpc_methods.install_on_diffusion()
    worker: Any = object.__new__(DiffusionWorker)
    worker.rank, worker.od_config = 0, SimpleNamespace()
    worker.model_runner = SimpleNamespace(pipeline=pipeline)
    worker._sleep_saved_buffers = {}
    wrapper: Any = object.__new__(diffusion_worker.WorkerWrapperBase)
    wrapper.worker = worker
    return wrapper


class OtherProcess:
    """Stands for the queue to a worker's process, and for its way back."""

    def __init__(self, worker, step_execution):
        self.proc: Any = object.__new__(diffusion_worker.WorkerProc)
        self.proc.worker, self.proc.gpu_id = worker, 0
        self.proc.od_config = SimpleNamespace(step_execution=step_execution)
        self.proc.result_mq = self
        self.answers = queue.Queue()

    def enqueue(self, message):
        answer, is_sent = self.proc._execute_rpc(pickled(message))
        assert is_sent
        self.answers.put(pickled(answer))

    def dequeue(self, timeout):
        return self.answers.get(timeout=timeout)


def pickled(value):
    return pickle.loads(pickle.dumps(value))  # noqa: S301


def in_this_process(worker):
    executor: Any = object.__new__(UniProcDiffusionExecutor)
    executor.driver_worker, executor._closed = worker, False
    executor._is_failed, executor._warned_about_timeout = False, False
    return executor


def in_another_process(worker, *, step_execution=False):
    executor: Any = object.__new__(MultiprocDiffusionExecutor)
    executor.od_config = SimpleNamespace(step_execution=step_execution)
    executor._closed = executor._is_failed = False
    other = OtherProcess(worker, step_execution)
    executor._broadcast_mq = executor._result_mq = other
    executor._sync_result_buffer = other.answers
    return executor


def a_step_at_a_time(worker):
    return in_another_process(worker, step_execution=True)


EXECUTORS = pytest.mark.parametrize(
    "executor", [in_this_process, in_another_process, a_step_at_a_time]
)


def called(executor, method, request=None):
    """As the API process calls it: what a stage answers is one replica's answers."""
    args = () if request is None else (wire.encode(request),)
    answers = executor.collective_rpc(method.name, timeout=30.0, args=args)
    return rpc_client.checked_answers(method, [across_processes(answers)])


@EXECUTORS
def test_every_method_answers_as_that_of_a_talkers_worker(executor, speakers, ref):
    reached = executor(worker_of(SimpleNamespace(tts_cache_speakers=speakers)))
    (described,) = called(reached, rpc_client.DESCRIBE, wire.DescribeCall(b"secret"))
    assert described.fingerprints == speakers.fingerprints
    call = want_call(speakers, ref, ["codec"])
    (first,) = called(reached, rpc_client.WANT, call)
    assert JobState.READY not in {report.state for report in first.reports}
    wait_until_idle(speakers)
    (then,) = called(reached, rpc_client.WANT, call)
    assert then.reports[0].state is JobState.READY
    (stats,) = called(reached, rpc_client.STATS)
    assert stats.stats.encodes == {"codec": 1}
    assert stats.stats.rpc_calls["tts_cache_want"] == 2
    asked = wire.EncodingCall(ref.audio_sha256, speakers.fingerprints["codec"])
    (stored,) = called(reached, rpc_client.ENCODING, asked)
    assert stored.encoding
    of_one = wire.FailedCall(request_ids=["speech-1"])
    (failed,) = called(reached, rpc_client.FAILED, of_one)
    assert failed.causes == {}
    gone = wire.DeleteCall(audio_sha256s=[ref.audio_sha256])
    (deleted,) = called(reached, rpc_client.DELETE, gone)
    assert (deleted.num_entries, deleted.busy) == (1, [])


@EXECUTORS
@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        (SimpleNamespace(), "SimpleNamespace clones no voices"),
        (SimpleNamespace(tts_cache_refusal="It has no tokenizer."), "no tokenizer"),
        (None, "NoneType clones no voices"),
    ],
)
def test_a_pipeline_without_speakers_says_so(executor, pipeline, says):
    with pytest.raises(rpc_client.UnsupportedModelError, match=says):
        called(executor(worker_of(pipeline)), rpc_client.DESCRIBE)


def test_installing_twice_is_installing_once():
    rpc_methods.install_on_diffusion()
    before = {**vars(DiffusionWorker)}
    rpc_methods.install_on_diffusion()
    assert {**vars(DiffusionWorker)} == before
    assert rpc_methods.METHODS[0] in before.values()


# Its sleep mode, whose methods are its own and not a mixin's


@pytest.fixture
def allocator(monkeypatch):
    allocator = Allocator()
    of = SimpleNamespace(get_instance=lambda: allocator)
    monkeypatch.setattr(diffusion_worker, "_get_cumem_allocator_class", lambda: of)
    platform = SimpleNamespace(
        synchronize=lambda: None,
        empty_cache=lambda: None,
        get_free_memory=lambda: 0,
        get_device_total_memory=lambda: 0,
    )
    monkeypatch.setattr(diffusion_worker, "current_omni_platform", platform)
    return allocator


@pytest.fixture
def asleep(speakers, allocator):
    wrapper = worker_of(SimpleNamespace(tts_cache_speakers=speakers))
    runner = wrapper.worker.model_runner
    runner.refresh_diffusion_kv_block_table_layout = lambda: None
    return wrapper


def test_a_worker_that_slept_encodes_again(asleep, allocator, speakers, ref):
    asleep.sleep(1)
    assert state(speakers, ref) is JobState.FAILED
    assert asleep.wake_up(None) is True
    state(speakers, ref)
    wait_until_idle(speakers)
    assert state(speakers, ref) is JobState.READY
    assert allocator.asked == ["sleep", "wake_up"]


def test_one_that_could_not_go_to_sleep_encodes_on(asleep, allocator, speakers, ref):
    allocator.error = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"):
        asleep.sleep(1)
    assert state(speakers, ref) is not JobState.FAILED
    wait_until_idle(speakers)


def test_weights_that_are_woken_alone_let_nothing_be_encoded(asleep, speakers, ref):
    asleep.sleep(1)
    asleep.wake_up(["weights"])
    assert state(speakers, ref) is JobState.FAILED
    asleep.wake_up(["weights", "kv_cache"])
    assert state(speakers, ref) is not JobState.FAILED
    wait_until_idle(speakers)


def test_a_pipeline_without_speakers_sleeps_as_the_hosts(allocator):
    wrapper = worker_of(None)
    wrapper.worker.model_runner = None
    wrapper.sleep(1)
    assert wrapper.wake_up(None) is True
    assert allocator.asked == ["sleep", "wake_up"]
