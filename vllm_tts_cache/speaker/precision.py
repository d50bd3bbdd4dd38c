"""Exact float32 for encoders, their threads' priority, and their device's name."""

import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch

from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.logs import logger
from vllm_tts_cache.store.encoding import ComputedOn

# At 10 a thread gets a tenth of a core beside a busy one. At 19 it would get a
# seventieth, and a request would time out before its reference is encoded. Only
# lowering the value needs a privilege.
NICE = 10

REDUCED = frozenset({"tf32", "bf16"})  # what torch calls a shorter mantissa

Undo = Callable[[], None]

_CPU_INFO = Path("/proc/cpuinfo")


def lower_priority(nice: int = NICE) -> None:
    """Lower the priority of the calling thread and of threads that it starts.

    The caller does so before the thread's first tensor operation: the threads that
    compute for it inherit its value at their start.
    """
    thread_id = threading.get_native_id()
    try:
        nice = max(nice, os.getpriority(os.PRIO_PROCESS, thread_id))
        os.setpriority(os.PRIO_PROCESS, thread_id, nice)
    except OSError as exc:  # a sandbox may refuse any call
        logger.info("A thread keeps its CPU priority, beside streams: %s", exc)


@contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """Turn gradients, autocast and TF32 off inside the block.

    The first two belong to the calling thread. TF32 is a flag of the whole process,
    which the decode loop reads too, so it is changed only where it is on, and restored
    when the last of the overlapping blocks ends. Until then the decode loop computes
    its float32 operations more precisely as well.

    Raises: EncodeError: Another thread sets the flags meanwhile. The caller must drop
        what the block computed.
    """
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        with _flags.lock:
            _flags.num_holders += 1
        try:
            with _flags.lock:
                _flags.undo += _use_full_precision(device.type)
            _check(device.type)
            yield
            _check(device.type)
        finally:
            with _flags.lock:
                _flags.num_holders -= 1
                while not _flags.num_holders and _flags.undo:
                    _flags.undo.pop()()


@contextmanager
def encoding_exactly(device: torch.device, network: str) -> Iterator[None]:
    """Compute as in `exact_float32`.

    Raises: EncodeError: As there, or torch or soxr failed in the block.
    """
    try:
        with exact_float32(device):
            yield
    except (RuntimeError, ValueError) as exc:
        raise EncodeError(f"{network}: {exc}") from exc


# Of the blocks of the whole process that need full precision.
_flags = SimpleNamespace(lock=Lock(), num_holders=0, undo=list[Undo]())

# Torch adds its backends when it is imported, unseen by a type checker.
_backends: Any = torch.backends


def operations(device_type: str) -> dict[str, Any]:
    """Return the operations of encoders, with torch's setting of each on a device."""
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
    """Turn reduced float32 off on this device; return calls that restore it.

    An operation without a setting of its own follows its backend's, and a backend that
    of all. So this goes from the top down: a setting that is still reduced then is so
    by itself, and can be restored exactly.
    """
    settings: list[tuple[Any, Callable[[Any], Undo]]] = [(_backends, _turn_off)]
    if device_type == "cuda":
        settings.append((_backends.cudnn, _turn_off))
    matmul, conv = operations(device_type).values()
    settings += [(matmul, _turn_off_matmul), (conv, _turn_off_conv)]
    return [off(each) for each, off in settings if each.fp32_precision in REDUCED]


# Torch has an old and a new interface to the same flags. The old one is used where it
# still knows their state, because it keeps both in step: if they disagree, the next
# reader of the old one (torch.compile) gets an exception.


def _turn_off(setting: Any) -> Undo:
    before = setting.fp32_precision
    setting.fp32_precision = "ieee"
    return lambda: setattr(setting, "fp32_precision", before)


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
        # That sets both devices', and one may have been set alone.
        for setting, precision in zip(every, own, strict=True):
            if setting.fp32_precision != precision:
                setting.fp32_precision = precision

    return undo


def _turn_off_conv(conv: Any) -> Undo:
    cudnn = _backends.cudnn
    try:
        # The old interface has no setting for a CPU.
        is_known = conv is cudnn.conv and cudnn.allow_tf32
    except RuntimeError:
        is_known = False
    if not is_known:
        return _turn_off(conv)
    cudnn.allow_tf32 = False
    return lambda: setattr(cudnn, "allow_tf32", True)


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Make float32 the default dtype inside the block, as for every later encode.

    While the host loads a model, its dtype is the default of all threads.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def hold_exact_matmuls(model_dtype: torch.dtype) -> None:
    """Compute float32 matrix products exactly from now on, unless the model is float32.

    ``VLLM_FLOAT32_MATMUL_PRECISION`` may ask for less. Each encode would turn that off
    and on again, and torch would compile the decode loop anew while streams run. Done
    before anything is compiled, it costs a model of another dtype no time.
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
    """Name a device that encoders compute on; initialises CUDA for a CUDA device."""
    if device.type == "cpu":
        name = cpu_name()
    elif device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = str(device)
    version = str(torch.__version__)
    return ComputedOn(device=device.type, device_name=name, torch_version=version)


def cpu_name() -> str:
    """Return the CPU's name by its maker, or else its architecture."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.is_file() else []
    for line in lines:
        key, colon, name = line.partition(":")
        if key.startswith("model name") and colon:
            return name.strip()
    return platform.processor() or platform.machine()
