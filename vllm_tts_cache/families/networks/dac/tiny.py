"""Random weights of a DAC's layers, for tiny checkpoints. Not a model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_tts_cache.testing.tiny_parts import WeightBuilder

_RESIDUAL_GAIN = 0.5
# Speech has a standard deviation of about 0.1; the layers behind work at about 1.
INPUT_GAIN = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DacParts:
    """Adds layers under a file's names; at a gain of 1 they keep a signal's variance.

    Attributes:
        conv: Text between a convolution's name and its parameters' names.
        direction: Name of the direction of a weight-normed weight.
        norm: Name of its norm.
        is_depthwise: Whether the wider convolution of a residual unit is depthwise.
        down_gain: Of the convolution that ends a stage of the encoder.
        up_gain: Of the transposed convolution in a stage of the decoder.
    """

    conv: str
    direction: str
    norm: str
    is_depthwise: bool = False
    down_gain: float = 1.0
    up_gain: float = 1.0

    def add_conv(
        self,
        weights: WeightBuilder,
        name: str,
        shape: tuple[int, int, int],
        gain: float = 1.0,
    ) -> None:
        """Add a weight-normed convolution ``(out, in, kernel)``.

        Inputs of unit variance come out with a standard deviation of ``gain``. The
        weights of an output sum to zero: the activations before the convolution only
        add, and the constant that all its inputs then share must not pass.
        """
        conv = weights.under(f"{name}{self.conv}")
        direction = conv.normal(self.direction, shape, 1.0)
        if shape[1] > 1:
            direction -= direction.mean(dim=(1, 2), keepdim=True)
        conv.fill(self.norm, (shape[0], 1, 1), gain)
        conv.fill("bias", shape[:1], 0.0)

    def add_snake(self, weights: WeightBuilder, name: str, width: int) -> None:
        """Add the frequencies of a periodic activation."""
        weights.fill(f"{name}.alpha", (1, width, 1), 1.0)

    def add_down(self, blocks: WeightBuilder, width: int, rates: Sequence[int]) -> int:
        """Add an encoder's first convolution, and stages that each double the width.

        Returns: The width after the last stage.
        """
        self.add_conv(blocks, "0", (width, 1, 7), INPUT_GAIN)
        for index, rate in enumerate(rates, start=1):
            stage = blocks.under(f"{index}.block")
            self._add_residual_units(stage, 0, width)
            self.add_snake(stage, "3", width)
            shape = 2 * width, width, 2 * rate
            self.add_conv(stage, "4", shape, self.down_gain)
            width *= 2
        return width

    def add_up(
        self,
        blocks: WeightBuilder,
        width: int,
        rates: Sequence[int],
        *,
        first: int,
        output_gain: float,
    ) -> None:
        """Add stages that upsample and halve the width, and a decoder's last layers.

        The first stage has the number ``first``; ``output_gain`` is that of the last
        convolution, whose outputs are samples.
        """
        for index, rate in enumerate(rates, start=first):
            stage = blocks.under(f"{index}.block")
            self.add_snake(stage, "0", width)
            self._add_transposed_conv(stage, "1", (width, width // 2), rate)
            width //= 2
            self._add_residual_units(stage, 2, width)
        last = first + len(rates)
        self.add_snake(blocks, str(last), width)
        self.add_conv(blocks, str(last + 1), (1, width, 7), output_gain)

    def _add_transposed_conv(
        self, weights: WeightBuilder, name: str, widths: tuple[int, int], stride: int
    ) -> None:
        """Add a weight-normed transposed convolution of two strides' width."""
        conv = weights.under(f"{name}{self.conv}")
        direction = conv.normal(self.direction, (*widths, 2 * stride), 1.0)
        direction -= direction.mean(dim=0, keepdim=True)
        # Here the norm is over outputs and kernel; 2 taps of an input meet in each one.
        gain = self.up_gain * math.sqrt(widths[1] * stride / widths[0])
        conv.fill(self.norm, (widths[0], 1, 1), gain)
        conv.fill("bias", widths[1:], 0.0)

    def _add_residual_units(self, stage: WeightBuilder, first: int, width: int) -> None:
        """Add three units, the first at ``first``; their dilations have no weights."""
        for index in range(first, first + 3):
            unit = stage.under(f"{index}.block")
            self.add_snake(unit, "0", width)
            self.add_conv(unit, "1", (width, 1 if self.is_depthwise else width, 7))
            self.add_snake(unit, "2", width)
            self.add_conv(unit, "3", (width, width, 1), _RESIDUAL_GAIN)
