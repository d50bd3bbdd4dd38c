"""What our CPU platform changes in torch, and where it does not."""

import queue
import threading
from typing import Any

import pytest
import torch
import vllm_omni  # noqa: F401  which imports our platform; the other way is a circle

from vllm_tts_cache.platforms import cpu_worker

# A call that needs a device, the question whether there is one, what ours answers.
CALLS = (
    (torch.accelerator, "empty_cache", torch.accelerator, "is_available", None),
    (torch.cuda, "is_current_stream_capturing", torch.backends.cuda, "is_built", False),
)


@pytest.mark.parametrize("has_device", [True, False])
def test_only_without_a_device_are_its_calls_answered_by_us(monkeypatch, has_device):
    def raises():
        raise RuntimeError("Cannot access accelerator device when none is available.")

    for owner, name, asked, question, _ in CALLS:
        monkeypatch.setattr(owner, name, raises)
        monkeypatch.setattr(asked, question, lambda: has_device)
    cpu_worker.answer_without_accelerator()
    for owner, name, _, _, answer in CALLS:
        if has_device:
            assert getattr(owner, name) is raises
        else:
            assert getattr(owner, name)() is answer


def test_attention_of_decoders_and_diffusion_runs_where_the_host_ships_none(
    monkeypatch,
):
    """OmniVoice computes with the fallback, as our attention packs no requests."""
    from vllm_omni.diffusion.attention import selector
    from vllm_omni.diffusion.attention.backends.abstract import AttentionImpl
    from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl
    from vllm_omni.diffusion.attention.layer import Attention

    # Put back afterwards, as others may look at the host's own.
    monkeypatch.setattr(SDPAImpl, "forward", AttentionImpl.forward)
    asked = selector._cached_get_backend_cls.__wrapped__
    monkeypatch.setattr(selector, "_cached_get_backend_cls", asked)
    options = {"num_heads": 2, "head_size": 8, "softmax_scale": 1.0, "causal": False}
    rows = torch.randn(1, 5, 2, 8, generator=torch.Generator())
    with pytest.raises(NotImplementedError):
        SDPAImpl(**options).forward(rows, rows, rows)
    layer = Attention(**options)  # which asks our platform
    assert layer.sdpa_fallback is not None
    answer = layer.sdpa_fallback.forward(rows, rows, rows)
    assert answer.shape == rows.shape
    assert torch.equal(layer.attention.forward(rows, rows, rows), answer)


@pytest.fixture
def handed_on(monkeypatch):
    """What a diffusion worker in a process of its own hands on, without a device."""
    from vllm_omni.diffusion.worker.diffusion_worker import WorkerProc

    # Put back afterwards, as others may look at the host's own.
    monkeypatch.setattr(WorkerProc, "_async_output_loop", WorkerProc._async_output_loop)
    cpu_worker.pack_outputs_here()

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
    def fail(_output):
        raise OSError("no shared memory")

    monkeypatch.setattr(cpu_worker, "pack_diffusion_output_shm", fail)
    (told,) = handed_on(object())
    assert told.output is None and "no shared memory" in told.error
