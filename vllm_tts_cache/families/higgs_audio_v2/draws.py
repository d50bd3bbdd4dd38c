"""Draws codes by the generators of the requests that speak them.

The host draws with the process's generator: first the codes of all rows of a step at
once, then again, row by row, codes that repeat too often. So a request's seed would
have no effect, and its audio would depend on the other requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# The host draws a code again that has so many repeats in the codebook's last frames.
WINDOW_FRAMES, MAX_REPEATS = 7, 2


@dataclass(frozen=True, slots=True, eq=False)
class SpeakingRow:
    """A row of the batch whose next frame is drawn.

    Attributes:
        generator: The generator of the row's request; None for the process's own.
        spoken: ``(num_codebooks, num_frames)`` so far; None if there are no frames.
    """

    generator: torch.Generator | None
    spoken: Tensor | None

    def num_repeated(self, codes: Tensor) -> int:
        """Return how many of ``(num_codebooks,)`` codes the host draws again."""
        if self.spoken is None or self.spoken.shape[-1] < WINDOW_FRAMES:
            return 0
        window = self.spoken[:, -WINDOW_FRAMES:].to(codes.device)
        same = (window == codes.unsqueeze(-1)).sum(dim=-1)
        return int((same >= MAX_REPEATS).sum())


@dataclass(slots=True, eq=False)
class Draws:
    """The draws of one step by the rows that speak, in the order of the host's."""

    rows: Sequence[SpeakingRow]
    num_codebooks: int
    _repeating: list[tuple[SpeakingRow, int]] | None = field(default=None, init=False)

    def draw(self, weights: Tensor) -> Tensor | None:
        """Draw a code with each row of weights ``(num_draws, num_codes)``.

        Returns: ``(num_draws, 1)``; None if this is not the next draw of the host.
        """
        if self._repeating is None:
            return self._first(weights)
        if not self._repeating or self._repeating[0][1] != len(weights):
            return None
        row, _ = self._repeating.pop(0)
        return _drawn(weights, row)

    def _first(self, weights: Tensor) -> Tensor | None:
        self._repeating = []
        # The host draws nothing for codebooks whose probabilities sum to zero.
        if not self.rows or len(weights) != len(self.rows) * self.num_codebooks:
            return None
        parts = weights.chunk(len(self.rows))
        codes = [_drawn(*each) for each in zip(parts, self.rows, strict=True)]
        for row, drawn in zip(self.rows, codes, strict=True):
            if number := row.num_repeated(drawn[:, 0]):
                self._repeating.append((row, number))
        return torch.cat(codes)


class DrawnByRequests(TorchFunctionMode):
    """Makes the host's draws of codes within its block, once ``draws`` is set."""

    draws: Draws | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Draw codes by ``draws``; call every other function of torch as it is."""
        if func is torch.multinomial and self.draws is not None:
            drawn = self.draws.draw(args[0])
            if drawn is not None:
                return drawn
        return func(*args, **(kwargs or {}))


def _drawn(weights: Tensor, row: SpeakingRow) -> Tensor:
    return torch.multinomial(weights, num_samples=1, generator=row.generator)
