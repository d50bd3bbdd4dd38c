"""Random weights of what a DAC is made of, for tiny checkpoints. Not a model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_tts_cache.testing.tiny_parts import WeightBuilder

_RESIDUAL_GAIN = 0.5
# Speech has a standard deviation of about 0.1; the layers behind work at about 1.
INPUT_GAIN = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DacParts:
    """Adds parts by the names that a file has for them; it keeps variance.

    Attributes:
        conv: What stands between a convolution's name and those of its parameters.
        direction: Of a weight-normed weight.
        norm: Of the same.
        is_depthwise: Whether the wider convolution of a residual unit is.
        down_gain: Of what a stage of the encoder ends with.
        up_gain: Of what a stage of the decoder begins with.
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
        """A weight-normed convolution ``(out, in, kernel)``.

        Inputs of unit variance come out with a standard deviation of ``gain``; what all
        of them have in common does not come out, since the activations before it only
        ever add.
        """
        conv = weights.under(f"{name}{self.conv}")
        direction = conv.normal(self.direction, shape, 1.0)
        if shape[1] > 1:
            direction -= direction.mean(dim=(1, 2), keepdim=True)
        conv.fill(self.norm, (shape[0], 1, 1), gain)
        conv.fill("bias", shape[:1], 0.0)

    def add_snake(self, weights: WeightBuilder, name: str, width: int) -> None:
        """The periodic activation's frequencies."""
        weights.fill(f"{name}.alpha", (1, width, 1), 1.0)

    def add_down(self, blocks: WeightBuilder, width: int, rates: Sequence[int]) -> int:
        """What begins an encoder, and stages that downsample and double the width.

        Returns: The width behind them.
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
        """Stages that upsample and halve the width, and what ends a decoder.

        Args:
            blocks: Where to.
            width: Before them.
            rates: Of each stage.
            first: The number of the first one.
            output_gain: Of the samples.
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
        """A weight-normed transposed convolution of two strides' width."""
        conv = weights.under(f"{name}{self.conv}")
        direction = conv.normal(self.direction, (*widths, 2 * stride), 1.0)
        direction -= direction.mean(dim=0, keepdim=True)
        # The norm is over outputs and kernel here; 2 taps of each input meet.
        gain = self.up_gain * math.sqrt(widths[1] * stride / widths[0])
        conv.fill(self.norm, (widths[0], 1, 1), gain)
        conv.fill("bias", widths[1:], 0.0)

    def _add_residual_units(self, stage: WeightBuilder, first: int, width: int) -> None:
        """Three units, at ``first`` and after it; their dilations have no weights."""
        for index in range(first, first + 3):
            unit = stage.under(f"{index}.block")
            self.add_snake(unit, "0", width)
            self.add_conv(unit, "1", (width, 1 if self.is_depthwise else width, 7))
            self.add_snake(unit, "2", width)
            self.add_conv(unit, "3", (width, width, 1), _RESIDUAL_GAIN)
