"""Reads a state dict of ``torch.save`` without running code in it, and writes one."""

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
    """Return the file's entries by name, usually tensors, on the CPU.

    Tensors may be views of the file: copy what is kept. A state dict may lie under
    ``wrappers``, the outermost first.

    Raises: CheckpointError if the file cannot be read, or holds no state dict.
    """
    try:
        # OSError for a file that cannot be opened; torch may raise other errors.
        path.open("rb").close()
        state: Any = torch.load(  # noqa: TID251 -- weights_only runs no code
            path,
            map_location="cpu",
            weights_only=True,
            # Mapped, as parts that only decoding needs are not read. Files of torch
            # before 1.6 are no archives, and torch cannot map them.
            mmap=zipfile.is_zipfile(path),
        )
    except OSError as exc:
        raise CheckpointError(str(path), exc.strerror or str(exc)) from exc
    except (RuntimeError, ValueError, LookupError, EOFError, UnpicklingError) as exc:
        first_line = str(exc).partition("\n")[0]
        raise CheckpointError(str(path), f"not a torch file: {first_line}") from exc
    for wrapper in wrappers:
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping):
        raise CheckpointError(str(path), "it does not hold a state dict")
    return {str(name): value for name, value in state.items()}


def write_torch_file(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state dict. Raises: OSError if the disk is full, and no RuntimeError."""
    with path.open("wb") as file:
        torch.save(state, file)


def tensors_under(state: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """Return the tensors (no step count, say) by their names after a prefix."""
    return {
        name.removeprefix(prefix): value
        for name, value in state.items()
        if name.startswith(prefix) and isinstance(value, Tensor)
    }
