"""Whether this machine has what vLLM-Omni's own platforms need."""

import torch


def is_available() -> bool:
    """Tell whether torch sees an accelerator of any kind."""
    return torch.accelerator.is_available()
