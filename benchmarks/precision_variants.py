"""The ways to run a reference encoder's network, and what each of them costs."""

import contextlib
import ctypes
import gc
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks import machine
from benchmarks.precision_clips import Clip, synthetic
from benchmarks.precision_networks import Network, Values, differences
from benchmarks.precision_report import Measurement
from vllm_tts_cache.speaker.precision import exact_float32

# Milliseconds: elapsed, and of CPU.
_Times = tuple[float, float]


@contextmanager
def tf32(_device: torch.device) -> Iterator[None]:
    """TF32 in matrix products and convolutions, as a process may have it."""
    conv = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = conv


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to compute.

    Attributes:
        neighbours: Lengths of the other clips of the batch, relative to the clip's.
        around: What the computation runs in.
        dtype: Of the network and its input.
    """

    name: str
    neighbours: Sequence[float] = ()
    around: Callable[[torch.device], AbstractContextManager[None]] = exact_float32
    dtype: torch.dtype = torch.float32
    needs_cuda: bool = False


OURS = "float32 (ours)"

# bfloat16 comes last, because it casts the network where it is.
VARIANTS = (
    Variant(name=OURS),
    Variant(name="TF32 on", around=tf32, needs_cuda=True),
    Variant(name="batch of 4, one length", neighbours=(1, 1, 1)),
    Variant(name="batch of 4, padded", neighbours=(0.5, 0.8, 1.25)),
    Variant(name="bfloat16", dtype=torch.bfloat16),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """How a variant is measured.

    Attributes:
        num_samples: Timed runs; fewer if the limit comes first.
        limit_seconds: For all runs of one variant on one clip.
    """

    device: torch.device
    num_samples: int
    limit_seconds: float

    def measure(
        self, network: Network, variant: Variant, clip: Clip, expected: Values | None
    ) -> Measurement:
        """Time one variant on one clip, and compare what it gives."""
        row = Measurement(
            encoder=network.encoder.name, variant=variant.name, clip=clip.name
        )
        if variant.needs_cuda and self.device.type != "cuda":
            return row.without("needs CUDA")
        if expected is None:
            return row.without("no float32 encoding within the limit")
        module = network.module.to(variant.dtype)
        assert next(module.parameters()).dtype == variant.dtype
        input_ = network.prepare(clip.audio)
        batch = _batch(network, input_, clip, variant.neighbours).to(variant.dtype)
        with _Memory(self.device) as memory, variant.around(self.device):
            runs, values = self._run(lambda: network.values(batch, len(input_)))
        if values is None:
            return row.without(f"more than {self.limit_seconds:g} s")
        # The first one also chooses kernels and fetches memory.
        warm = runs[1:] or runs
        return row.measured(
            times_ms=[elapsed_ms for elapsed_ms, _ in warm],
            cpu_ms=[cpu_ms for _, cpu_ms in warm],
            was_warm=len(runs) > 1,
            peak_bytes=memory.peak_bytes,
            rest_bytes=memory.rest_bytes,
            differences=differences(network, values, expected),
            is_equal=bool(np.array_equal(values, expected)),
        )

    def _run(self, compute: Callable[[], Values]) -> tuple[list[_Times], Values | None]:
        """Times of each run within the limit, and what the last one gave."""
        runs: list[_Times] = []
        values = None
        with contextlib.suppress(TimeoutError), _limit(self.limit_seconds):
            for _ in range(1 + self.num_samples):
                began, cpu_began = time.perf_counter(), time.process_time()
                values = compute()
                ended, cpu_ended = time.perf_counter(), time.process_time()
                runs.append((1e3 * (ended - began), 1e3 * (cpu_ended - cpu_began)))
        return runs, values

    def expected(self, network: Network, clip: Clip) -> Values | None:
        """What the encoder itself gives; None if that takes longer than the limit."""
        with contextlib.suppress(TimeoutError), _limit(self.limit_seconds):
            return network.expected(clip.audio)
        return None


def _batch(
    network: Network, input_: Tensor, clip: Clip, neighbours: Sequence[float]
) -> Tensor:
    """The clip and its neighbours, filled up to the longest: ``(num_clips, ...)``."""
    lengths = [round(len(input_) * relative) for relative in neighbours]
    longest = max([len(input_), *lengths])
    others = [
        # A little longer than needed, then cut: lengths are rounded on the way.
        network.prepare(synthetic(1.1 * relative * clip.audio.seconds, seed))[:length]
        for seed, (relative, length) in enumerate(
            zip(neighbours, lengths, strict=True), start=100
        )
    ]
    return torch.stack(
        [_fill_up(one, longest, network.silence) for one in (input_, *others)]
    )


def _fill_up(input_: Tensor, length: int, value: float) -> Tensor:
    after = [0, 0] * (input_.ndim - 1) + [0, length - len(input_)]
    return pad(input_, after, value=value)


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block, after the torch operation that is running."""

    def stop(_number: int, _frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Memory:
    """Memory before the block and its peak inside, network and clip included."""

    def __init__(self, device: torch.device):
        self._device = device
        self.rest_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> "_Memory":
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self.rest_bytes = torch.cuda.memory_allocated(self._device)
            return self
        with contextlib.suppress(AttributeError, OSError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        self.rest_bytes = machine.rss_bytes()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            return
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                self.peak_bytes = int(line.split()[1]) * 1024
