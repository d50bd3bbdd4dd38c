"""The acoustic half of the tokenizer: the encoder of a DAC.

Source: ``DacEncoder`` of transformers 5.14, to which it is equal bit for bit on a CPU;
its parameters are called as in the file.
"""

from torch import Tensor, empty, nn

from vllm_tts_cache.families.networks.higgs_tokenizer.sizes import AcousticSizes

_DILATIONS = (1, 3, 9)


class AcousticEncoder(nn.Module):
    """``(1, 1, num_samples)`` to ``(1, hidden, num_frames)``."""

    def __init__(self, sizes: AcousticSizes):
        super().__init__()
        width = sizes.encoder_hidden_size
        self.conv1 = nn.Conv1d(1, width, 7, padding=3)
        blocks: list[nn.Module] = []
        for rate in sizes.downsampling_ratios:
            blocks.append(_Block(width, rate))
            width *= 2
        self.block = nn.ModuleList(blocks)
        self.snake1 = _Snake(width)
        self.conv2 = nn.Conv1d(width, sizes.hidden_size, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Encode; the same in every thread and however often."""
        x = self.conv1(x)
        for block in self.block:
            x = block(x)
        return self.conv2(self.snake1(x))

    def num_frames(self, num_samples: int) -> int:
        """How many frames it makes of so many samples; 0 or less is too few."""
        for block in self.block:
            conv: nn.Conv1d = block.conv1  # pyright: ignore[reportAssignmentType]
            num_taps, stride = conv.kernel_size[0], conv.stride[0]
            padding = int(conv.padding[0])
            num_samples = (num_samples + 2 * padding - num_taps) // stride + 1
        return num_samples


class _Block(nn.Module):
    """Downsamples by ``rate`` and doubles the width."""

    def __init__(self, width: int, rate: int):
        super().__init__()
        for number, dilation in enumerate(_DILATIONS, start=1):
            self.add_module(f"res_unit{number}", _ResidualUnit(width, dilation))
        self.snake1 = _Snake(width)
        # Half a stride on both sides, rounded up as the released ones are.
        self.conv1 = nn.Conv1d(
            width, 2 * width, 2 * rate, stride=rate, padding=-(-rate // 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():  # in the order in which they are made
            x = layer(x)
        return x


class _ResidualUnit(nn.Module):
    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.snake1 = _Snake(width)
        self.conv1 = nn.Conv1d(width, width, 7, padding=3 * dilation, dilation=dilation)
        self.snake2 = _Snake(width)
        self.conv2 = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.snake2(self.conv1(self.snake1(x)))).add_(x)


class _Snake(nn.Module):
    """An activation that adds a square of a sine, of a frequency per channel."""

    def __init__(self, width: int):
        super().__init__()
        self.alpha = nn.Parameter(empty(1, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        # In place from the first product on: the first stages are large.
        wave = (self.alpha * x).sin_().pow_(2)
        return wave.mul_((self.alpha + 1e-9).reciprocal()).add_(x)
