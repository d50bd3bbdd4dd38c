"""The convolutions of the 12 Hz codec's encoder, the long ones in slices of time."""

from functools import partial

from torch import Tensor, nn
from transformers.models.mimi.modeling_mimi import (
    MimiConv1d,
    MimiEncoder,
    MimiResnetBlock,
)

from vllm_tts_cache.families.networks.slices import CausalPass, in_slices

# No kernel of theirs computes more than two of these: 3 GFLOP at the released size.
SLICE_SECONDS = 2.0
# Of a layer's input. Slower layers are wide and short: for 30 s the largest kernel has
# 20 GFLOP, and slices would spend their time on fetching weights.
_MIN_SLICED_RATE_HZ = 2_000


class SlicedEncoder(nn.Module):
    """The encoder's embeddings; called as the host's module, in whose place it is.

    Args:
        encoder: The host's, causal and padded with silence.
        sample_rate_hz: Of what it is given.
    """

    def __init__(self, encoder: MimiEncoder, sample_rate_hz: int):
        super().__init__()
        num_sliced, stride = 0, 1
        for number, layer in enumerate(encoder.layers, start=1):
            if sample_rate_hz < stride * _MIN_SLICED_RATE_HZ:
                break
            num_sliced = number
            if isinstance(layer, MimiConv1d):
                stride *= layer.conv.stride[0]
        self.sliced = nn.Sequential(*encoder.layers[:num_sliced])
        self.whole = nn.Sequential(*encoder.layers[num_sliced:])
        self.num_samples = round(SLICE_SECONDS * sample_rate_hz / stride) * stride

    def forward(self, samples: Tensor, padding_cache: None = None) -> Tensor:  # noqa: ARG002
        """``(batch, 1, num_samples)`` to ``(batch, hidden, num_samples / 960)``.

        ``padding_cache`` is the host's, for streams; nobody gives one.
        """
        sliced = partial(_compute, self.sliced)
        x = in_slices(sliced, samples, num_samples=self.num_samples)
        return _compute(self.whole, x, CausalPass())


def can_be_sliced(encoder: MimiEncoder) -> bool:
    """Whether all its convolutions see the past and silence only, as released."""
    return all(
        conv.causal and conv.pad_mode == "constant"
        for conv in encoder.modules()
        if isinstance(conv, MimiConv1d)
    )


def _compute(layer: nn.Module, x: Tensor, causal: CausalPass) -> Tensor:
    match layer:
        case nn.Sequential():
            for part in layer:
                x = _compute(part, x, causal)
            return x
        case MimiResnetBlock():
            inner = x
            for part in layer.block:
                inner = _compute(part, inner, causal)
            return _compute(layer.shortcut, x, causal) + inner
        case MimiConv1d():
            return causal.convolve(layer.conv, x)
    return layer(x)
