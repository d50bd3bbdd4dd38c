"""Long causal convolutions in slices of time, equal to the whole bit for bit.

A kernel over 30 s of audio fills a GPU for milliseconds, and each of the hundreds of
small kernels of a decode step may have to wait for one. So long layers are computed one
slice of time after the other, with pauses, and each convolution reads the end of the
slice before. Only one slice of their activations is ever in memory, which suits a CPU's
caches, too.

On a CPU the bits are equal under two conditions. Slices last at least half a second:
torch computes a convolution over 20,480 numbers or fewer by another kernel, and that
rounds differently. And one thread computes them, as in a server: several threads share
the terms of a sum by the length of the input. So `in_slices` computes the whole at once
where torch has several threads.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

# After each slice the GPU is left alone for this much of the time that it took.
PAUSE = 0.5


class CausalPass:
    """One clip's way through causal convolutions, slice by slice.

    It keeps the samples of earlier slices that each convolution still reads. Before the
    first slice there is silence.
    """

    def __init__(self) -> None:
        self._ends: dict[nn.Module, Tensor] = {}

    def convolve(self, conv: nn.Conv1d, x: Tensor) -> Tensor:
        """Return the output for ``(batch, channels, num_samples)`` of this slice.

        The convolution has no padding of its own. Only the last slice may end within a
        stride, which is filled up with silence.
        """
        stride = conv.stride[0]
        num_before = (conv.kernel_size[0] - 1) * conv.dilation[0] + 1 - stride
        num_missing = -x.shape[-1] % stride
        if num_before:
            end = self._ends.get(conv)
            x = pad(x, (num_before, 0)) if end is None else torch.cat([end, x], dim=-1)
            # A copy: a view would keep the whole slice in memory.
            self._ends[conv] = x[..., -num_before:].clone()
        return conv(pad(x, (0, num_missing)) if num_missing else x)


# Computes one slice by layers that have no state but that of causal convolutions, each
# of which goes through the `CausalPass`.
Layers = Callable[[Tensor, CausalPass], Tensor]


def in_slices(layers: Layers, x: Tensor, *, num_samples: int) -> Tensor:
    """Return the layers' output for all of ``x``, computed a slice after the other.

    Args:
        layers: Computes a slice.
        x: ``(batch, channels, length)``.
        num_samples: Length of a slice, in whole strides of all the layers together.
            The last slice has the remainder, too, so it is up to twice as long.
    """
    causal, rest = CausalPass(), _rest_on(x.device)
    is_shared = x.device.type == "cpu" and torch.get_num_threads() > 1
    lengths = slice_lengths(x.shape[-1], x.shape[-1] if is_shared else num_samples)
    done: list[Tensor] = []
    for part in x.split(lengths, dim=-1):
        if done:
            rest()
        done.append(layers(part, causal))
    return torch.cat(done, dim=-1)


def slice_lengths(length: int, num_samples: int) -> list[int]:
    """Return the length of each slice, see `in_slices`."""
    num_before = max(length // num_samples, 1) - 1
    return [num_samples] * num_before + [length - num_before * num_samples]


def _rest_on(device: torch.device) -> Callable[[], None]:
    """Return a wait that leaves a GPU to the decode loop between two slices."""
    if device.type != "cuda":
        return lambda: None  # Linux shares a CPU by the threads' priorities
    began = time.perf_counter()

    def rest() -> None:
        nonlocal began
        # Without kernels of ours in the queue, a decode step runs as if it were alone.
        # A wait that spins would take a core from the thread that starts its kernels.
        finished = torch.cuda.Event(blocking=True)
        finished.record()
        finished.synchronize()
        time.sleep(PAUSE * (time.perf_counter() - began))
        began = time.perf_counter()

    return rest
