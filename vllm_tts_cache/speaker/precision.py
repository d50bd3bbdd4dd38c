"""Float32 that is float32, in a process that may have asked for less.

And what of this machine computes encodings, by its name, on threads that let those go
first that somebody listens to.
"""

import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.store.encoding import ComputedOn

# Takes what decoding leaves over, and a tenth of a core against a thread that wants
# all of it. At 19 that would be a seventieth: a reference would outlive its request's
# patience. Nobody needs a privilege to be nicer; only the way back needs one.
NICE = 10

REDUCED = frozenset({"tf32", "bf16"})  # what torch calls a shorter mantissa

Undo = Callable[[], None]

logger = logging.getLogger("vllm.vllm_tts_cache")

_CPU_INFO = Path("/proc/cpuinfo")


def lower_priority() -> None:
    """Make the calling thread, and the threads it will start, nicer than decoding.

    Called before the thread's first tensor operation, because the threads that compute
    for it inherit its value at their start.
    """
    if sys.platform != "linux":  # elsewhere the value is the whole process's
        return
    thread_id = threading.get_native_id()
    try:
        nice = max(NICE, os.getpriority(os.PRIO_PROCESS, thread_id))
        os.setpriority(os.PRIO_PROCESS, thread_id, nice)
    except OSError as exc:  # a sandbox may refuse any call
        logger.info("A thread for references keeps its priority: %s", exc)


@contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast and no TF32 inside the block.

    The first two belong to the calling thread: a new one starts with gradients on,
    and a caller inside the engine may have autocast on. TF32 is a flag of the whole
    process, which the decode loop reads too, so it is touched only where it is on,
    and put back when the last of the overlapping blocks ends. Until then the decode
    loop computes its float32 operations, if it has any, more precisely as well.

    Raises:
        EncodeError: Float32 is short of some bits at the block's begin or end, because
            somebody else sets the flags meanwhile. What was computed may not be kept.
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
        self._undo: list[Undo] = []

    @contextmanager
    def held(self, device_type: str) -> Iterator[None]:
        with self._lock:
            self._num_holders += 1
        try:
            with self._lock:
                self._undo += _use_full_precision(device_type)
            _check(device_type)
            yield
            _check(device_type)
        finally:
            with self._lock:
                self._num_holders -= 1
                while not self._num_holders and self._undo:
                    self._undo.pop()()


# Torch adds what is looked up here when it is imported, unseen by a type checker.
_backends: Any = torch.backends

# A process has one set of flags, so it has one holder of them.
_flags = _ProcessFlags()


def operations(device_type: str) -> dict[str, Any]:
    """What encoders compute with, and torch's setting of each on this device."""
    if device_type == "cuda":
        matmul, conv = _backends.cuda.matmul, _backends.cudnn.conv
    else:
        matmul, conv = _backends.mkldnn.matmul, _backends.mkldnn.conv
    return {"matrix products": matmul, "convolutions": conv}


def _check(device_type: str) -> None:
    for what, setting in operations(device_type).items():
        if (precision := setting.fp32_precision) in REDUCED:
            raise EncodeError(
                f"{what} in float32 are {precision} in this process: something sets "
                "torch's precision flags while reference audio is encoded"
            )


def _use_full_precision(device_type: str) -> list[Undo]:
    """Turn off what shortens float32 on this device; return what turns it back on.

    An operation without a setting of its own follows its backend's, and that one all
    backends'. So they are looked at from the top down: what is still short after the
    settings above it are not is so by itself, and can be put back exactly.
    """
    undo: list[Undo] = []
    above: list[Any] = [torch.backends]
    if device_type == "cuda":
        above.append(torch.backends.cudnn)
    matmul, conv = operations(device_type).values()
    for setting in above:
        if setting.fp32_precision in REDUCED:
            undo.append(_turn_off(setting))
    if matmul.fp32_precision in REDUCED:
        undo.append(_turn_off_matmul(matmul))
    if conv.fp32_precision in REDUCED:
        undo.append(_turn_off_conv(conv))
    return undo


# Torch has an old and a new interface to the same flags. Where the old one still
# knows their state it is used, because it keeps both in step: if they disagree,
# whoever reads the old one next (torch.compile does) gets an exception.


def _turn_off(setting: Any) -> Undo:
    before = setting.fp32_precision
    setting.fp32_precision = "ieee"

    def undo() -> None:
        setting.fp32_precision = before

    return undo


def _turn_off_matmul(matmul: Any) -> Undo:
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the two disagree already
        return _turn_off(matmul)
    every = (_backends.cuda.matmul, _backends.mkldnn.matmul)
    own = [setting.fp32_precision for setting in every]
    torch.set_float32_matmul_precision("highest")

    def undo() -> None:
        torch.set_float32_matmul_precision(before)
        # That sets both devices', of which one may have been set alone.
        for setting, precision in zip(every, own, strict=True):
            if setting.fp32_precision != precision:
                setting.fp32_precision = precision

    return undo


def _turn_off_conv(conv: Any) -> Undo:
    cudnn = _backends.cudnn
    if conv is not cudnn.conv:
        return _turn_off(conv)  # the old interface has none for a CPU
    try:
        is_known = cudnn.allow_tf32
    except RuntimeError:
        is_known = False
    if not is_known:
        return _turn_off(conv)
    _allow_cudnn_tf32(False)
    return lambda: _allow_cudnn_tf32(True)


def _allow_cudnn_tf32(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allowed


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Load and encode with the default dtype that every later encode finds.

    The host loads a model with its dtype for the default, of all threads.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def hold_exact_matmuls(model_dtype: torch.dtype) -> None:
    """Compute float32 matrix products exactly from now on, as encoders do.

    ``VLLM_FLOAT32_MATMUL_PRECISION`` may ask for less. An encode would turn that off
    and on again, and whatever torch has compiled in this process depends on it: the
    decode loop would be compiled anew, beside running streams. Before anything is
    compiled it costs nothing, where the model has other matrix products than those.
    """
    # Read through torch's new interface: the old one raises where both were used.
    precision = str(torch.backends.cuda.matmul.fp32_precision)
    if precision in REDUCED and model_dtype is not torch.float32:
        logger.info(
            "float32 matrix products are computed exactly here, and not in %s: "
            "reference encoders need it so, and the model has few of them.",
            precision,
        )
        torch.set_float32_matmul_precision("highest")


@cache
def computed_on(device: torch.device) -> ComputedOn:
    """Name a device that encoders compute on; of a CUDA device its context is made."""
    if device.type == "cpu":
        name = cpu_name()
    elif device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = str(device)
    return ComputedOn(
        device=device.type, device_name=name, torch_version=str(torch.__version__)
    )


def cpu_name() -> str:
    """The CPU as its maker calls it, or else its architecture."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.is_file() else []
    names = (line.split(":", 1)[1].strip() for line in lines if _names_it(line))
    return next(names, platform.processor() or platform.machine())


def _names_it(line: str) -> bool:
    return line.startswith("model name") and ":" in line
