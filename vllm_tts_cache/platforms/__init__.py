"""The CPU as a platform of vLLM-Omni, to try and test the plugin without a GPU."""

import torch


def is_for_this_machine() -> bool:
    """Tell whether torch sees no accelerator, and vLLM is its build for CPUs.

    Another build that finds no accelerator (``CUDA_VISIBLE_DEVICES=""``, a broken
    driver) raises an error of its own, which a CPU platform would hide.
    """
    if torch.accelerator.is_available():
        return False
    from vllm.platforms import current_platform

    return current_platform.is_cpu()
