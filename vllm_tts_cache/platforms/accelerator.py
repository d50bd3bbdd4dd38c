"""Whether this is the machine, and the vLLM, that our CPU platform is for."""

import torch


def is_available() -> bool:
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
