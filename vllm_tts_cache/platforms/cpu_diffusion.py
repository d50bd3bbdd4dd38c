"""vLLM-Omni's worker of diffusion stages on a CPU, in its own process or another's."""

import logging
from typing import Any

from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker, WorkerProc

from vllm_tts_cache.platforms.cpu import forgive_emptying_no_cache
from vllm_tts_cache.platforms.cpu_diffusion_attention import fall_back_on_it
from vllm_tts_cache.platforms.cpu_isa import ask_for_tiles, leave_out_matrices
from vllm_tts_cache.throttled_log import ThrottledLog

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))


class CPUDiffusionWorker(DiffusionWorker):
    """Worker of diffusion stages."""

    def init_device(self) -> None:
        """Prepare this process before the pipeline is built in it."""
        leave_out_matrices()
        ask_for_tiles()
        forgive_emptying_no_cache()
        fall_back_on_it()
        pack_outputs_here()
        super().init_device()


def pack_outputs_here() -> None:
    """Have a worker in a process of its own hand its outputs on without a stream.

    The host's thread for that makes a stream of the accelerator before anything else,
    and without one it dies: no answer would ever arrive.
    """
    WorkerProc._async_output_loop = _hand_on_outputs


def _hand_on_outputs(self: Any) -> None:
    """Pack what was computed, one output after another, until there is None.

    What waits is counted by the host, which is told of each, whatever came of it.
    """
    while (item := self._async_output_queue.get()) is not None:
        output, output_id, _ = item
        handed: dict[str, Any] = {"output": output}
        try:
            pack_diffusion_output_shm(output)
        except Exception as exc:  # noqa: BLE001  whose output would never arrive
            throttled.warn_of(
                "handing an output on",
                "Output %s cannot be handed on",
                output_id,
                mistake=exc,
            )
            handed = {"error": f"it cannot be handed on: {exc}"}
        self._enqueue_result(
            AsyncDiffusionOutput(
                kind=AsyncOutputKind.OUTPUT_READY, async_output_id=output_id, **handed
            )
        )
        with self._async_output_done:
            self._async_output_pending -= 1
            self._async_output_done.notify_all()
