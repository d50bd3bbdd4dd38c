"""Platforms for vLLM-Omni, and whether a machine and its vLLM are what ours is for.

And what a process may use of a processor's matrix instructions (AMX).
"""

import os

import torch

from vllm_tts_cache import patch_once

MAX_ISA = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_MATRICES = "AVX512_CORE_BF16"
# oneDNN's names of what has no instructions for bfloat16.
_WITHOUT_BFLOAT16 = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI"),
    *("AVX512_CORE", "AVX512_CORE_VNNI"),
)


def has_accelerator() -> bool:
    """Tell whether torch sees an accelerator of any kind."""
    return torch.accelerator.is_available()


def vllm_is_for_cpus() -> bool:
    """Tell whether vLLM itself would run on the CPU: it is its build for CPUs.

    Any other vLLM has no kernels for it. Where such a one finds no accelerator
    (``CUDA_VISIBLE_DEVICES=""``, a driver that is broken) it has an error of its own to
    say so, and a CPU platform would only hide it.
    """
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def leave_out_matrices() -> None:
    """Keep oneDNN from AMX, unless the environment already says how far it may go.

    Its AMX kernels round a row differently in larger batches. oneDNN reads the limit
    when it is first used, so this comes before the model is built. Processors without
    AMX keep all that they have.
    """
    if torch.cpu._is_amx_tile_supported():
        os.environ.setdefault(MAX_ISA, _WITHOUT_MATRICES)  # noqa: TID251  oneDNN reads it
        if os.environ[MAX_ISA].upper() in _WITHOUT_BFLOAT16:  # noqa: TID251
            _leave_out_packed_weights()


def _leave_out_packed_weights() -> None:
    """Keep vLLM from a multiplication that aborts the process.

    It takes it wherever the processor has AMX, and oneDNN, which does the work, has no
    kernel for it under such a limit.
    """
    from vllm.model_executor.layers import utils

    def never(_n: int, _k: int, _dtype: torch.dtype) -> bool:
        return False

    patch_once(utils, "check_cpu_sgl_kernel", lambda _: never)


def ask_for_tiles() -> None:
    """Ask the kernel for AMX's tile registers, which vLLM's attention uses unasked.

    Linux gives them to a process that asks, and kills one that uses them without
    (SIGILL). oneDNN asks for its own sake; with the limit above it does not.
    """
    if torch.cpu._is_amx_tile_supported() and hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()
