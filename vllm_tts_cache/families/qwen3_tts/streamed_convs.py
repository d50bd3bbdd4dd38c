"""Causal convolutions that continue after columns that they read before.

The codec decoder turns hidden frames into samples by causal convolutions. The host
gives them 12 earlier frames with each chunk, and throws the samples of these away. Here
each convolution keeps the last columns that it read of a voice's reference instead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    modeling_qwen3_tts_tokenizer_v2 as host,
)

# The columns that each convolution reads again, in the order of their calls.
Tails = list[Tensor]
_Conv = Callable[[Tensor], Tensor]


class StreamedConvs:
    """Lets a decoder's convolutions begin after columns that they read before.

    Outside of the blocks of `recorded` and `behind` they compute as the host does.

    Args:
        decoder: The host's codec decoder.
    """

    def __init__(self, decoder: Any):
        self._tails: Tails | None = None
        self._num_read = 0
        self._is_recording = False
        for module in (*decoder.upsample.modules(), *decoder.decoder.modules()):
            if (streamed := self._streamed(module)) is not None:
                module.forward = partial(streamed, module, module.forward)

    def _streamed(self, module: Any) -> Callable[[Any, _Conv, Tensor], Tensor] | None:
        """Return how a convolution reads earlier columns; None for other modules."""
        if isinstance(module, host.Qwen3TTSTokenizerV2CausalConvNet):
            return self._conv if module.padding else None
        if isinstance(module, host.Qwen3TTSTokenizerV2CausalTransConvNet):
            return self._spread if module.right_pad else None
        return None

    @contextmanager
    def recorded(self) -> Iterator[Tails]:
        """Yield a list to which each convolution adds the columns that it read last."""
        self._tails, self._is_recording = [], True
        try:
            yield self._tails
        finally:
            self._tails, self._is_recording = None, False

    @contextmanager
    def behind(self, tails: Tails) -> Iterator[None]:
        """Let the convolutions begin after ``tails``; each must run once."""
        self._tails, self._num_read = tails, 0
        try:
            yield
        finally:
            self._tails = None

    def _conv(self, module: Any, forward: _Conv, columns: Tensor) -> Tensor:
        if self._tails is None:
            return forward(columns)
        if self._is_recording:
            self._record(columns, module.padding)
            return forward(columns)
        return module.conv(self._joined(columns)).contiguous()

    def _spread(self, module: Any, forward: _Conv, columns: Tensor) -> Tensor:
        """Compute a transposed convolution, whose columns overlap the next ones."""
        if self._tails is None:
            return forward(columns)
        (stride,), (width,) = module.conv.stride, module.conv.kernel_size
        num_read = -(-width // stride) - 1
        if self._is_recording:
            self._record(columns, num_read)
            return forward(columns)
        spread = module.conv(self._joined(columns))
        return spread[..., num_read * stride : -module.right_pad].contiguous()

    def _record(self, columns: Tensor, num_read: int) -> None:
        assert self._tails is not None
        padded = functional.pad(columns, (max(0, num_read - columns.shape[-1]), 0))
        self._tails.append(padded[..., -num_read:].clone())

    def _joined(self, columns: Tensor) -> Tensor:
        assert self._tails is not None
        tail = self._tails[self._num_read]
        self._num_read += 1
        return torch.cat([tail, columns], dim=-1)
