"""The CPU platform for vLLM-Omni: where it applies, and which instructions it uses."""

import os

import torch

from vllm_tts_cache import patch_once

MAX_ISA = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_MATRICES = "AVX512_CORE_BF16"
# oneDNN's names of instruction sets without bfloat16.
_WITHOUT_BFLOAT16 = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI"),
    *("AVX512_CORE", "AVX512_CORE_VNNI"),
)


def is_for_this_machine() -> bool:
    """Tell whether torch sees no accelerator, and vLLM is its build for CPUs.

    Another build that finds no accelerator (``CUDA_VISIBLE_DEVICES=""``, a broken
    driver) raises an error of its own, which a CPU platform would hide.
    """
    if torch.accelerator.is_available():
        return False
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def leave_out_matrices() -> None:
    """Keep oneDNN from AMX, unless the environment already limits it.

    Its AMX kernels round a row differently in larger batches. oneDNN reads the limit at
    its first use, so this comes before the model is built.
    """
    if not torch.cpu._is_amx_tile_supported():
        return
    os.environ.setdefault(MAX_ISA, _WITHOUT_MATRICES)  # noqa: TID251  oneDNN reads it
    if os.environ[MAX_ISA].upper() in _WITHOUT_BFLOAT16:  # noqa: TID251
        from vllm.model_executor.layers import utils

        # vLLM multiplies by packed weights on each processor with AMX. oneDNN has no
        # kernel for that under such a limit, and aborts the process.
        patch_once(utils, "check_cpu_sgl_kernel", lambda _: lambda *_args: False)


def ask_for_tiles() -> None:
    """Ask Linux for AMX's tile registers, which vLLM's attention uses.

    Linux kills a process that uses them without asking (SIGILL). oneDNN asks for them,
    but not under the limit of `leave_out_matrices`.
    """
    if torch.cpu._is_amx_tile_supported() and hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()
