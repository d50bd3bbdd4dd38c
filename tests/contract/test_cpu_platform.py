"""What our CPU platform changes in torch, and where it does not."""

import queue
import threading
from typing import Any

import pytest
import torch
import vllm_omni  # noqa: F401  which imports our platform; the other way is a circle

from vllm_tts_cache.platforms.cpu import (
    forgive_emptying_no_cache,
    say_that_nothing_is_captured,
)

# A call that needs a device, the question whether there is one, what ours answers.
CALLS = (
    (
        *(torch.accelerator, "empty_cache"),
        *(torch.accelerator, "is_available"),
        *(forgive_emptying_no_cache, None),
    ),
    (
        *(torch.cuda, "is_current_stream_capturing"),
        *(torch.backends.cuda, "is_built"),
        *(say_that_nothing_is_captured, False),
    ),
)


@pytest.mark.parametrize(
    ("owner", "name", "asked", "question", "patch", "answer"), CALLS
)
def test_only_without_a_device_is_its_call_answered_by_us(
    monkeypatch, owner, name, asked, question, patch, answer
):
    def raises():
        raise RuntimeError("Cannot access accelerator device when none is available.")

    for has_device in (True, False):
        monkeypatch.setattr(owner, name, raises)
        monkeypatch.setattr(asked, question, lambda has=has_device: has)
        patch()
        if has_device:
            assert getattr(owner, name) is raises
        else:
            assert getattr(owner, name)() is answer


def test_diffusion_attention_runs_on_a_platform_that_the_host_does_not_ship():
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl

    from vllm_tts_cache.platforms.cpu import CPUOmniPlatform as Platform

    backend = resolve_obj_by_qualname(Platform.get_diffusion_attn_backend_cls(None, 8))
    options = {"num_heads": 2, "head_size": 8, "softmax_scale": 1.0}
    rows = torch.randn(1, 5, 2, 8, generator=torch.Generator())
    with pytest.raises(NotImplementedError):
        SDPAImpl(**options).forward(rows, rows, rows)
    answer = backend.get_impl_cls()(**options).forward(rows, rows, rows)
    assert answer.shape == rows.shape


def test_what_the_hosts_layers_fall_back_on_runs_there_as_well(monkeypatch):
    """OmniVoice computes with that, as our attention packs no requests."""
    from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend
    from vllm_omni.diffusion.attention.layer import Attention

    from vllm_tts_cache.platforms.cpu_kernels import fall_back_on_it

    # Put back afterwards, as others may look at the host's own.
    monkeypatch.setattr(SDPABackend, "get_impl_cls", SDPABackend.get_impl_cls)
    fall_back_on_it()
    options = {"num_heads": 2, "head_size": 8, "softmax_scale": 1.0, "causal": False}
    layer = Attention(**options)
    rows = torch.randn(1, 5, 2, 8, generator=torch.Generator())
    assert layer.sdpa_fallback is not None
    answer = layer.sdpa_fallback.forward(rows, rows, rows)
    assert torch.equal(answer, layer.attention.forward(rows, rows, rows))


@pytest.fixture
def handed_on(monkeypatch):
    """What a diffusion worker in a process of its own hands on, without a device."""
    from vllm_omni.diffusion.worker.diffusion_worker import WorkerProc

    from vllm_tts_cache.platforms import cpu_kernels

    # Put back afterwards, as others may look at the host's own.
    monkeypatch.setattr(WorkerProc, "_async_output_loop", WorkerProc._async_output_loop)
    cpu_kernels.pack_outputs_here()

    def hand_on(*outputs):
        process: Any = object.__new__(WorkerProc)
        process._async_output_queue = queue.Queue()
        process._async_output_done = threading.Condition()
        process._async_output_pending = len(outputs)
        told = []
        process._enqueue_result = told.append
        for number, output in enumerate(outputs):
            process._async_output_queue.put((output, str(number), None))
        process._async_output_queue.put(None)
        process._async_output_loop()
        assert process._async_output_pending == 0
        return told

    return hand_on


def test_a_worker_of_its_own_process_hands_outputs_on_without_a_stream(handed_on):
    from vllm_omni.diffusion.data import AsyncOutputKind, DiffusionOutput

    spoken = DiffusionOutput(output=torch.ones(1, 1, 960))
    failed = DiffusionOutput(error="no speaker prompt")
    one, other = handed_on(spoken, failed)
    assert (one.async_output_id, other.async_output_id) == ("0", "1")
    assert {one.kind, other.kind} == {AsyncOutputKind.OUTPUT_READY}
    assert torch.equal(one.output.output, torch.ones(1, 1, 960))
    assert other.output.error == "no speaker prompt" and other.error is None


def test_what_cannot_be_handed_on_is_an_error_of_that_output(handed_on, monkeypatch):
    from vllm_tts_cache.platforms import cpu_kernels

    def fail(_output):
        raise OSError("no shared memory")

    monkeypatch.setattr(cpu_kernels, "pack_diffusion_output_shm", fail)
    (told,) = handed_on(object())
    assert told.output is None and "no shared memory" in told.error
