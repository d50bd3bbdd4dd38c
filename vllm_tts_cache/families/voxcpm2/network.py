"""The encoder of VoxCPM2's AudioVAE: samples to the means of its latents.

A network of our own: it needs no package, so an upgrade of one makes no voice anew. And
the package's activation is a script, which torch may fuse on a GPU after its first runs
and then rounds otherwise; here every run of a clip is the same.

Source: ``AudioVAE.encode`` of voxcpm 2.0.3, to which it is equal bit for bit on a CPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

_DILATIONS = (1, 3, 9)

# `conv1d`, but for one call without cuDNN. For the last convolution of 10 s cuDNN 9
# chose an algorithm on an H200 that takes 67 GB and 0.2 s, and it asks nobody for how
# much it may take; torch's own kernels need 0.5 GB and 17 ms for all layers together.
_convolve = torch._convolution  # pyright: ignore[reportPrivateImportUsage]


class AudioEncoder(nn.Module):
    """``(1, 1, num_samples)``, of whole latents, to ``(1, latent_dim, num_latents)``.

    Its parameters are called as in the file, where they lie below ``encoder.``. Call
    `multiply_out` when they are loaded, before it is run.
    """

    def __init__(
        self, *, width: int, rates: Sequence[int], latent_dim: int, depthwise: bool
    ):
        super().__init__()
        blocks: list[nn.Module] = [_CausalConv(1, width, 7)]
        for rate in rates:
            blocks.append(_Stage(width, rate, width if depthwise else 1))
            width *= 2
        self.block = nn.Sequential(*blocks)
        self.fc_mu = _CausalConv(width, latent_dim, 3)

    def forward(self, samples: Tensor) -> Tensor:
        """Encode; the same in every thread and however often."""
        return self.fc_mu(self.block(samples))

    def multiply_out(self) -> None:
        """Make each weight of its direction and norm, once instead of every time."""
        for module in self.modules():
            if isinstance(module, _CausalConv):
                module.multiply_out()


class _CausalConv(nn.Module):
    """A convolution over what came before; its weight is kept as norm and direction."""

    weight: Tensor  # once it is multiplied out

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
    ):
        super().__init__()
        self.weight_g = nn.Parameter(torch.empty(num_outputs, 1, 1))
        self.weight_v = nn.Parameter(
            torch.empty(num_outputs, num_inputs // groups, kernel)
        )
        self.bias = nn.Parameter(torch.empty(num_outputs))
        self._stride, self._dilation, self._groups = stride, dilation, groups
        # So that every stride-th input has an output, which sees nothing after it.
        self._before = (kernel - 1) * dilation + 1 - stride

    def forward(self, x: Tensor) -> Tensor:
        return _convolve(
            pad(x, (self._before, 0)),
            self.weight,
            self.bias,
            [self._stride],
            [0],  # padding
            [self._dilation],
            False,  # not transposed
            [0],  # output padding
            self._groups,
            False,  # algorithms are not timed
            False,  # torch's own are deterministic
            False,  # no cuDNN
            False,  # no TF32
        )

    def multiply_out(self) -> None:
        # Torch's own kernel; written out, the last bit would differ.
        multiply = torch._weight_norm  # pyright: ignore[reportPrivateImportUsage]
        weight = multiply(self.weight_v, self.weight_g, 0)
        del self.weight_v, self.weight_g
        self.register_buffer("weight", weight)


class _Snake(nn.Module):
    """An activation that adds a square of a sine, of a frequency per channel."""

    def __init__(self, width: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        # In place from the first product on: the first stages are large.
        wave = (self.alpha * x).sin_().pow_(2)
        return wave.mul_((self.alpha + 1e-9).reciprocal()).add_(x)


class _ResidualUnit(nn.Module):
    def __init__(self, width: int, dilation: int, groups: int):
        super().__init__()
        self.block = nn.Sequential(
            _Snake(width),
            _CausalConv(width, width, 7, dilation=dilation, groups=groups),
            _Snake(width),
            _CausalConv(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).add_(x)


class _Stage(nn.Module):
    """Downsamples by ``rate`` and doubles the width."""

    def __init__(self, width: int, rate: int, groups: int):
        super().__init__()
        self.block = nn.Sequential(
            *(_ResidualUnit(width, dilation, groups) for dilation in _DILATIONS),
            _Snake(width),
            _CausalConv(width, 2 * width, 2 * rate, stride=rate),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)
