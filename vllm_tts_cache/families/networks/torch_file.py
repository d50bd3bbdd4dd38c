"""Reading a state dict out of a file of ``torch.save``; nothing in it is run."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 -- torch raises it; nothing is unpickled
from typing import Any

import torch
from torch import Tensor

from vllm_tts_cache.errors import CheckpointError


def read_torch_file(
    path: Path, *, wrappers: Sequence[str] = ("state_dict",)
) -> dict[str, Any]:
    """What the file holds by name, usually tensors; they are on the CPU.

    Tensors may be views of the file: copy what is kept.

    Args:
        path: The file.
        wrappers: Names under which a state dict may lie, the outermost first.

    Raises:
        CheckpointError: It cannot be read, or holds something else.
    """
    state = _load(path)
    for wrapper in wrappers:
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping):
        raise CheckpointError(str(path), "it does not hold a state dict")
    return {str(name): value for name, value in state.items()}


def only_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Leave out what is no tensor: a step count, say, of a training."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _load(path: Path) -> Any:
    try:
        # Told apart here, since torch has other errors for what is no file.
        path.open("rb").close()
        return torch.load(  # noqa: TID251 -- the released form; weights_only runs no code
            path,
            map_location="cpu",
            weights_only=True,
            # A part of the file is for decoding, and need not be read. Files of torch
            # before 1.6 are no archives, which it cannot map.
            mmap=zipfile.is_zipfile(path),
        )
    except OSError as exc:
        raise CheckpointError(str(path), exc.strerror or str(exc)) from exc
    except (RuntimeError, ValueError, LookupError, EOFError, UnpicklingError) as exc:
        first_line = str(exc).partition("\n")[0]
        raise CheckpointError(str(path), f"not a torch file: {first_line}") from exc
