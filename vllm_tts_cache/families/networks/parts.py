"""Parts that encoders of several codecs have."""

from typing import Any

import torch
from torch import Tensor, nn


class Snake(nn.Module):
    """An activation that adds the square of a sine, with a frequency per channel.

    Official ones are TorchScript. On a GPU torch fuses a scripted function after its
    first runs, for some lengths, and then rounds differently: a clip's codes would
    depend on what the process encoded before.
    """

    def __init__(self, width: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activated channels, in the memory of a new tensor."""
        # In place after the first product, as the first stages are large.
        wave = (self.alpha * x).sin_().pow_(2)
        return wave.mul_((self.alpha + 1e-9).reciprocal()).add_(x)


def replace_snakes(network: nn.Module, theirs: type[nn.Module]) -> None:
    """Put `Snake` where a network has another class with its parameter."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, theirs):
                alpha: Any = child.alpha
                snake = Snake(alpha.numel())
                snake.alpha = alpha
                setattr(module, name, snake)


def multiply_out(conv: Any, dim: int) -> None:
    """Give a convolution the weight that its norm and direction along ``dim`` make."""
    # Torch's own kernel; written out, the last bit would differ.
    multiply = torch._weight_norm  # pyright: ignore[reportPrivateImportUsage]
    weight = multiply(conv.weight_v, conv.weight_g, dim)
    del conv.weight_v, conv.weight_g
    conv.register_buffer("weight", weight)
