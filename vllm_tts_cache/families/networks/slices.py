"""Long causal convolutions in slices of time, equal to the whole bit for bit.

A kernel over 30 s of audio fills a GPU for milliseconds, and each of the hundreds of
small kernels of a decode step may have to wait for such a one in its turn. So layers
that are long are computed a slice of time after the other, each convolution seeing the
end of the slice before, with a pause in between. Only one slice of them is ever in
memory, which suits a CPU's caches, too.

On a CPU that takes two things. Slices have at least half a second: torch hands a
convolution over no more than 20,480 numbers to another kernel, which rounds otherwise.
And they are computed by one thread, as in a server: on several, how a kernel shares
its sums among them depends on the length. Where a thread has several, it computes the
whole at once.
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

    It keeps what each convolution still needs of the slices before. Before the first
    one there is silence.
    """

    def __init__(self) -> None:
        self._ends: dict[nn.Module, Tensor] = {}

    def convolve(self, conv: nn.Conv1d, x: Tensor) -> Tensor:
        """The convolution's output for this slice.

        Args:
            conv: Without padding of its own.
            x: ``(batch, channels, num_samples)``; whole strides but in the last slice,
                where silence fills the last one up.
        """
        stride = conv.stride[0]
        num_before = (conv.kernel_size[0] - 1) * conv.dilation[0] + 1 - stride
        num_missing = -x.shape[-1] % stride
        if num_before:
            end = self._ends.get(conv)
            x = pad(x, (num_before, 0)) if end is None else torch.cat([end, x], dim=-1)
            # A copy, or all of the slice would be kept for it.
            self._ends[conv] = x[..., -num_before:].clone()
        return conv(pad(x, (0, num_missing)) if num_missing else x)


# Layers without a memory but that of their convolutions, which are causal: one slice,
# each convolution through the pass.
Layers = Callable[[Tensor, CausalPass], Tensor]


def in_slices(layers: Layers, x: Tensor, *, num_samples: int) -> Tensor:
    """The layers' output for all of ``x``, computed a slice after the other.

    Args:
        layers: What is computed.
        x: ``(batch, channels, length)``.
        num_samples: Of a slice; whole strides of all the layers together. What is
            left belongs to the last slice, which is up to twice as long.
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
    """How long each slice is, see `in_slices`."""
    num_before = max(length // num_samples, 1) - 1
    return [num_samples] * num_before + [length - num_before * num_samples]


def _rest_on(device: torch.device) -> Callable[[], None]:
    """What leaves the device to the decode loop between two slices."""
    if device.type != "cuda":
        return lambda: None  # a CPU's scheduler sees to that
    began = time.perf_counter()

    def rest() -> None:
        nonlocal began
        # With nothing of ours in the queue, a decode step runs as if it were alone. A
        # wait that spins would take a core from the thread that starts its kernels.
        finished = torch.cuda.Event(blocking=True)
        finished.record()
        finished.synchronize()
        time.sleep(PAUSE * (time.perf_counter() - began))
        began = time.perf_counter()

    return rest
