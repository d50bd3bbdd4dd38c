"""Networks in ``.onnx`` files, run on the CPU by ONNX Runtime.

One thread computes, the one that asks: the encode thread gives way to decoding, and a
pool of the runtime's own would not. The number of threads is part of what is computed,
since sums are shared among them.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
from torch import Tensor

from vllm_tts_cache.audio.speech_detector import one_thread_session
from vllm_tts_cache.errors import CheckpointError

# In the fingerprint beside the file.
VERSION: str = onnxruntime.__version__
NUM_THREADS = 1  # as `one_thread_session` has it
# An entry of a tensor's ``external_data``, as Protocol Buffers write it: in which other
# file its numbers are.
_ELSEWHERE = re.compile(rb"\x0a\x08location\x12")

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, eq=False)
class OnnxNetwork:
    """A network of one output; safe to call from any thread."""

    session: onnxruntime.InferenceSession

    def __call__(self, *inputs: Array) -> Array:
        """Compute the output for the inputs, in the order that the file has them.

        Raises:
            Exception: The runtime's own, of many kinds.
        """
        names = [given.name for given in self.session.get_inputs()]
        fed = dict(zip(names, inputs, strict=True))
        (output, *_) = self.session.run(None, fed)
        return np.asarray(output)


def load_onnx(path: Path, *, num_inputs: int) -> OnnxNetwork:
    """Load a file.

    Raises: CheckpointError if it cannot be read, is no network of so many inputs, or
        not all of the network.
    """
    _check_readable(path)
    try:
        session = one_thread_session(path)
    except Exception as exc:  # the runtime's have no base of their own
        first_line = str(exc).partition("\n")[0]
        raise CheckpointError(str(path), f"not an ONNX file: {first_line}") from exc
    if (found := len(session.get_inputs())) != num_inputs:
        reason = f"it has {found} inputs, and {num_inputs} are known what to do with"
        raise CheckpointError(str(path), reason)
    # A fingerprint is over the bytes of this file.
    if _ELSEWHERE.search(_mapped(path).data):
        reason = (
            "it keeps weights in another file, which is not supported: save it as "
            "one (onnx.save(onnx.load(path), path))"
        )
        raise CheckpointError(str(path), reason)
    return OnnxNetwork(session)


def file_bytes(path: Path) -> dict[str, Tensor]:
    """The file's bytes as its only tensor, for a fingerprint; they stay on the disk.

    Raises: CheckpointError if it cannot be read.
    """
    _check_readable(path)
    return {path.name: torch.from_numpy(_mapped(path))}


def runtime_settings() -> dict[str, Any]:
    """What of the runtime belongs in a fingerprint."""
    return {
        "onnxruntime": VERSION,
        "provider": "CPUExecutionProvider",
        "num_threads": NUM_THREADS,
        "optimization": "all",  # the runtime's default
    }


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    # Copy on write: torch wants memory that could be written to, and nobody does.
    return np.memmap(path, dtype=np.uint8, mode="c")


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as exc:
        raise CheckpointError(str(path), exc.strerror or str(exc)) from exc
    if is_empty:
        raise CheckpointError(str(path), "it is empty")
