"""The encoder of VoxCPM2's AudioVAE: samples to the means of its latents.

It needs no package, so an upgrade of the official one encodes no voice again. The
package's activation is TorchScript; with `Snake` every run of a clip is the same.

Source: ``AudioVAE.encode`` of voxcpm 2.0.3, to which it is equal bit for bit on a CPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from vllm_tts_cache.families.networks.parts import Snake, multiply_out

_DILATIONS = (1, 3, 9)

# `conv1d` with a switch for cuDNN. For the last convolution of 10 s cuDNN 9, which has
# no memory limit, chose an algorithm on an H200 that takes 67 GB and 0.2 s;
# torch's own kernels need 0.5 GB and 17 ms for all layers together.
_convolve = torch._convolution  # pyright: ignore[reportPrivateImportUsage]


class AudioEncoder(nn.Module):
    """``(1, 1, num_samples)``, of whole latents, to ``(1, latent_dim, num_latents)``.

    Its parameters have the file's names, without ``encoder.``. Call `multiply_out`
    after they are loaded, before `forward`.
    """

    def __init__(
        self,
        *,
        encoder_dim: int,
        encoder_rates: Sequence[int],
        latent_dim: int,
        depthwise: bool,
    ):
        super().__init__()
        width = encoder_dim
        blocks: list[nn.Module] = [_CausalConv(1, width, 7)]
        for rate in encoder_rates:
            blocks.append(_Stage(width, rate, width if depthwise else 1))
            width *= 2
        self.block = nn.Sequential(*blocks)
        self.fc_mu = _CausalConv(width, latent_dim, 3)

    def forward(self, samples: Tensor) -> Tensor:
        """Encode, with the same bits in every thread and every call."""
        return self.fc_mu(self.block(samples))

    def multiply_out(self) -> None:
        """Compute each weight from its direction and norm, once for all calls."""
        for module in self.modules():
            if isinstance(module, _CausalConv):
                multiply_out(module, 0)


class _CausalConv(nn.Module):
    """A causal convolution; its weight is loaded as norm and direction."""

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
        shape = num_outputs, num_inputs // groups, kernel
        self.weight_v = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(num_outputs))
        self._stride, self._dilation, self._groups = stride, dilation, groups
        # So that every stride-th input has an output, which reads no later input.
        self._num_padded = (kernel - 1) * dilation + 1 - stride

    def forward(self, x: Tensor) -> Tensor:
        return _convolve(
            pad(x, (self._num_padded, 0)),
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


class _ResidualUnit(nn.Module):
    def __init__(self, width: int, dilation: int, groups: int):
        super().__init__()
        self.block = nn.Sequential(
            Snake(width),
            _CausalConv(width, width, 7, dilation=dilation, groups=groups),
            Snake(width),
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
            Snake(width),
            _CausalConv(width, 2 * width, 2 * rate, stride=rate),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)
