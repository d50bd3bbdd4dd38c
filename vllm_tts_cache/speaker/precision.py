"""Float32 that is float32, in a process that may have asked for less."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

import torch

# The names that torch gives to float32 with a shorter mantissa, and the word for
# the same in torch.set_float32_matmul_precision.
_MATMUL_PRECISION = {"tf32": "high", "bf16": "medium"}


@contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast and no TF32 inside the block.

    The first two belong to the calling thread: a new one starts with gradients on,
    and a caller inside the engine may have autocast on. TF32 is a flag of the whole
    process, which the decode loop reads too, so it is touched only where it is on,
    and put back when the last of the overlapping blocks ends. Until then the decode
    loop computes its float32 operations, if it has any, more precisely as well.
    """
    with (
        torch.inference_mode(),
        torch.autocast(device.type, enabled=False),
        _flags.held(device.type),
    ):
        yield


class _ProcessFlags:
    """Counts the blocks that need full precision, since the flags have no owner."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_holders = 0
        self._undo: list[Callable[[], None]] = []

    @contextmanager
    def held(self, device_type: str) -> Iterator[None]:
        with self._lock:
            self._num_holders += 1
            self._undo += _use_full_precision(device_type)
        try:
            yield
        finally:
            with self._lock:
                self._num_holders -= 1
                while not self._num_holders and self._undo:
                    self._undo.pop()()


# A process has one set of flags, so it has one holder of them.
_flags = _ProcessFlags()


def _use_full_precision(device_type: str) -> list[Callable[[], None]]:
    """Turn off what shortens float32 on this device; what to call to turn it back on.

    The state is read through torch's new interface, which never raises, and set
    through the old one, which keeps both in step: if they disagree, whoever reads
    the old one next (torch.compile does) gets an exception.
    """
    undo: list[Callable[[], None]] = []
    cuda, cudnn, cpu = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    on_gpu = device_type == "cuda"
    matmul = cuda.matmul if on_gpu else cpu.matmul
    reduced = _MATMUL_PRECISION.get(str(matmul.fp32_precision))
    if reduced is not None:
        torch.set_float32_matmul_precision("highest")
        undo.append(lambda: torch.set_float32_matmul_precision(reduced))
    if on_gpu and cudnn.conv.fp32_precision == "tf32":
        _allow_cudnn_tf32(False)
        undo.append(lambda: _allow_cudnn_tf32(True))
    return undo


def _allow_cudnn_tf32(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allowed
