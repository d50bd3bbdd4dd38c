"""vLLM-Omni's workers and model runners on vLLM's CPU ones.

Cooperative inheritance: ``CPU*ModelRunner -> _CPURunner -> CPUModelRunner ->
GPU{AR,Generation}ModelRunner -> OmniGPUModelRunner -> ... -> GPUModelRunner``.
"""

import os
from typing import Any

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker, WorkerProc
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin

from vllm_tts_cache import patch_once
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.platforms.cpu_kernels import leave_out_matrices, separate_rows

throttled = ThrottledLog()


def answer_without_accelerator() -> None:
    """Answer two calls that models of the host make, and that raise without one."""
    if not torch.accelerator.is_available():
        patch_once(torch.accelerator, "empty_cache", lambda _: lambda: None)
    if not torch.backends.cuda.is_built():
        patch_once(torch.cuda, "is_current_stream_capturing", lambda _: lambda: False)


def use_invariant_attention() -> None:
    """Make this process compute attention that does not depend on the batch.

    vLLM splits the keys of few queries among threads, so on several threads a single
    query would get other bits than the same one among many.
    """
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"  # noqa: TID251  vLLM reads it there
    backend = "vllm_tts_cache.platforms.cpu_kernels.InvariantCPUAttentionBackend"
    register_backend(AttentionBackendEnum.CPU_ATTN, backend)


class _CPURunner(CPUModelRunner):
    def load_model(self, load_dummy_weights: bool = False) -> None:
        # The CPU platform leaves this at None, and the host calls max() with it.
        if self.compilation_config.max_cudagraph_capture_size is None:
            self.compilation_config.max_cudagraph_capture_size = 0
        # CPUModelRunner.load_model, which never calls super(), is left out: without the
        # next one the talker's buffers would be missing.
        super(CPUModelRunner, self).load_model(load_dummy_weights)

    def _to_list(self, sampled_token_ids: torch.Tensor) -> list[list[int]]:
        # The host's hook for other ids, which CPUModelRunner's version leaves out.
        override: Any = getattr(self, "_sampled_token_ids_cpu_override", None)
        if override is not None and (ids := override(sampled_token_ids)) is not None:
            return ids
        return sampled_token_ids.tolist()


class _RewindableGenerator:
    """Replaces a CPU generator while vLLM undoes a draw that it discards.

    vLLM rewinds by ``set_offset(get_offset() - 4)``, which only CUDA generators have: a
    seeded request in a chunked prefill would end a CPU engine.
    """

    def __init__(self, generator: torch.Generator, state: torch.Tensor):
        self._generator, self._state = generator, state

    def get_offset(self) -> int:
        return 4

    def set_offset(self, _: int) -> None:
        self._generator.set_state(self._state)


class CPUARModelRunner(_CPURunner, GPUARModelRunner):
    """Runs autoregressive stages on the CPU."""

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load the model, and make a token's bits independent of its batch."""
        super().load_model(load_dummy_weights)
        separate_rows(self.model)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        self._states = {row: g.get_state() for row, g in generators.items()}
        return super()._sample(*args, **kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        real = dict(generators)
        states = getattr(self, "_states", {})
        for row, generator in real.items():
            if row in states:
                generators[row] = _RewindableGenerator(generator, states[row])
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(real)


class CPUGenerationModelRunner(_CPURunner, GPUGenerationModelRunner):
    """Runs codec-decoder stages on the CPU."""


class _CPUWorker(OmniWorkerMixin, cpu_worker.CPUWorker):
    model_runner_cls: type[CPUModelRunner]

    def init_device(self) -> None:
        # The second runner needs Triton kernels, which no release compiles for a CPU.
        self.use_v2_model_runner = False
        leave_out_matrices()
        answer_without_accelerator()
        module: Any = cpu_worker  # the base class builds the runner that it finds there
        module.CPUModelRunner = self.model_runner_cls
        try:
            super().init_device()
        finally:
            module.CPUModelRunner = CPUModelRunner

    def encoder_loaded(self) -> bool:
        """Whether the model can encode references; the host's Voxtral adapter asks."""
        loaded = getattr(self.model_runner.model, "encoder_loaded", None)
        return loaded is not None and loaded()


class CPUARWorker(_CPUWorker):
    """Worker of autoregressive stages."""

    model_runner_cls = CPUARModelRunner

    def init_device(self) -> None:
        """Choose the attention before the base class builds the model with it."""
        use_invariant_attention()
        super().init_device()


class CPUGenerationWorker(_CPUWorker):
    """Worker of codec-decoder stages."""

    model_runner_cls = CPUGenerationModelRunner


class CPUDiffusionWorker(DiffusionWorker):
    """Worker of diffusion stages."""

    def init_device(self) -> None:
        """Prepare this process before the pipeline is built in it."""
        leave_out_matrices()
        answer_without_accelerator()
        pack_outputs_here()
        super().init_device()


def pack_outputs_here() -> None:
    """Replace the host's thread that sends a worker's outputs.

    The host's creates a stream of the accelerator. Without one it dies, and no output
    would ever arrive.
    """
    patch_once(WorkerProc, "_async_output_loop", lambda _: _hand_on_outputs)


def _hand_on_outputs(self: Any) -> None:
    """Send outputs until the queue gives None; count each as done, failed or not."""
    while (item := self._async_output_queue.get()) is not None:
        output, output_id, _ = item
        handed: dict[str, Any] = {"output": output}
        try:
            pack_diffusion_output_shm(output)
        except Exception as exc:  # noqa: BLE001  raising would end this thread
            throttled.warn_of(
                "handing an output on",
                "Output %s cannot be handed on",
                output_id,
                mistake=exc,
            )
            handed = {"error": f"The output cannot be handed on: {exc}"}
        self._enqueue_result(
            AsyncDiffusionOutput(
                kind=AsyncOutputKind.OUTPUT_READY, async_output_id=output_id, **handed
            )
        )
        with self._async_output_done:
            self._async_output_pending -= 1
            self._async_output_done.notify_all()
