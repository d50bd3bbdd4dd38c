"""Weight norms, which these codecs keep in their files."""

import torch
from torch import nn
from torch.nn.utils import remove_weight_norm
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations


def fix_weight_norms(codec: nn.Module) -> None:
    """Multiply them out once; on the device, because the host does it there."""
    with torch.no_grad():
        for module in codec.modules():
            if is_parametrized(module, "weight"):
                remove_parametrizations(module, "weight", leave_parametrized=True)
            elif hasattr(module, "weight_g"):
                remove_weight_norm(module)
    codec.requires_grad_(False)
