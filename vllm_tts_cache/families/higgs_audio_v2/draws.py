"""Codes drawn by the generators of the requests that speak them.

The host draws from the process's own: the codes of all rows of a step at once, then
row by row those anew that repeat themselves. So a request's seed would mean nothing,
and it would be heard who else speaks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# A codebook's code is drawn anew where so many of its last frames have it: the host's.
WINDOW_FRAMES, MAX_REPEATS = 7, 2


@dataclass(frozen=True, slots=True, eq=False)
class SpeakingRow:
    """A row of the batch whose next frame is drawn.

    Attributes:
        generator: Its request's; None: the process's own.
        spoken: ``(num_codebooks, num_frames)``, its request's so far; None: nothing.
    """

    generator: torch.Generator | None
    spoken: torch.Tensor | None

    def num_repeated(self, codes: torch.Tensor) -> int:
        """Count those of ``(num_codebooks,)`` codes that the host draws anew."""
        if self.spoken is None or self.spoken.shape[-1] < WINDOW_FRAMES:
            return 0
        window = self.spoken[:, -WINDOW_FRAMES:].to(codes.device)
        same = (window == codes.unsqueeze(-1)).sum(dim=-1)
        return int((same >= MAX_REPEATS).sum())


@dataclass(slots=True, eq=False)
class Draws:
    """The draws of one step, in the order in which the host makes them.

    Attributes:
        rows: Those that speak.
        num_codebooks: Codes that each of them draws.
    """

    rows: Sequence[SpeakingRow]
    num_codebooks: int
    _repeating: list[tuple[SpeakingRow, int]] | None = field(default=None, init=False)

    def draw(self, weights: torch.Tensor) -> torch.Tensor | None:
        """Draw one of each row of weights ``(num_draws, num_codes)``.

        Returns: ``(num_draws, 1)``; None if it is not what the host draws next.
        """
        if self._repeating is None:
            return self._first(weights)
        if not self._repeating or self._repeating[0][1] != len(weights):
            return None
        row, _ = self._repeating.pop(0)
        return _drawn(weights, row)

    def _first(self, weights: torch.Tensor) -> torch.Tensor | None:
        self._repeating = []
        # Of codebooks whose probabilities are none the host draws nothing.
        if not self.rows or len(weights) != len(self.rows) * self.num_codebooks:
            return None
        parts = weights.chunk(len(self.rows))
        codes = [_drawn(*each) for each in zip(parts, self.rows, strict=True)]
        for row, drawn in zip(self.rows, codes, strict=True):
            if number := row.num_repeated(drawn[:, 0]):
                self._repeating.append((row, number))
        return torch.cat(codes)


class DrawnByRequests(TorchFunctionMode):
    """While the host samples: its draws are made by ``draws``, once those are known."""

    draws: Draws | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch's, if it is not a draw of codes."""
        if func is torch.multinomial and self.draws is not None:
            drawn = self.draws.draw(args[0])
            if drawn is not None:
                return drawn
        return func(*args, **(kwargs or {}))


def _drawn(weights: torch.Tensor, row: SpeakingRow) -> torch.Tensor:
    return torch.multinomial(weights, num_samples=1, generator=row.generator)
