"""The convolutions of the DAC's encoder as ours: without scripts, and in slices."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm_omni.model_executor.models.fish_speech.dac_modules import (
    WindowLimitedTransformer,
)
from vllm_omni.model_executor.models.fish_speech.dac_modules.codec import (
    Encoder,
    EncoderBlock,
    ResidualUnit,
)
from vllm_omni.model_executor.models.fish_speech.dac_modules.conv import CausalConvNet
from vllm_omni.model_executor.models.fish_speech.dac_modules.layers import Snake1d

from vllm_tts_cache.families.fish_speech.codec import SAMPLE_RATE_HZ
from vllm_tts_cache.families.networks.slices import CausalPass, in_slices

# No kernel of theirs computes more than two of these: 10 GFLOP at the released size.
SLICE_SECONDS = 1.0


class Snake(nn.Module):
    """The host's activation with the same bits, and without its script.

    On a GPU a scripted function is fused after its first runs, for some lengths, and
    rounds otherwise from then on: a clip's codes would depend on what the process
    encoded before.
    """

    def __init__(self, alpha: nn.Parameter):
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        """Add the square of a sine, of a frequency per channel."""
        wave = torch.sin(self.alpha * x)
        # In place, since each of these would be among the largest tensors.
        wave.mul_(wave).mul_((self.alpha + 1e-9).reciprocal())
        return wave.add_(x)


class SlicedEncoder(nn.Module):
    """The encoder's latents; all before its transformer in slices of time."""

    def __init__(self, encoder: Encoder):
        super().__init__()
        _replace_snakes(encoder)
        layers = list(_flat(encoder.block))
        num_sliced = next(
            (
                n
                for n, m in enumerate(layers)
                if isinstance(m, WindowLimitedTransformer)
            ),
            len(layers),
        )
        self.sliced = nn.Sequential(*layers[:num_sliced])
        self.whole = nn.Sequential(*layers[num_sliced:])
        stride = math.prod(
            m.stride for m in self.sliced.modules() if isinstance(m, CausalConvNet)
        )
        self.num_samples = round(SLICE_SECONDS * SAMPLE_RATE_HZ / stride) * stride

    def forward(self, samples: Tensor) -> Tensor:
        """``(batch, 1, num_samples)`` to ``(batch, width, num_samples / 512)``."""
        sliced = partial(_compute, self.sliced)
        return self.whole(in_slices(sliced, samples, num_samples=self.num_samples))


def _flat(layers: Any) -> Iterator[nn.Module]:
    for layer in layers:
        if isinstance(layer, EncoderBlock):
            yield from _flat(layer.block)
        else:
            yield layer


def _replace_snakes(network: nn.Module) -> None:
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, Snake1d):
                setattr(module, name, Snake(child.alpha))


def _compute(layer: nn.Module, x: Tensor, causal: CausalPass) -> Tensor:
    match layer:
        case nn.Sequential():
            for part in layer:
                x = _compute(part, x, causal)
            return x
        case ResidualUnit():
            return x + _compute(layer.block, x, causal)
        case CausalConvNet():
            conv: Any = layer.conv
            return causal.convolve(conv, x)
    return layer(x)
