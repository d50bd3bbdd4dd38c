"""Reading some of a checkpoint's tensors, and their identity."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.speaker.checkpoint_files import read_json

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_NAMES_SHOWN = 8


def read_tensors(directory: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with ``prefix``, under the rest of their names.

    They are on the CPU, in the checkpoint's dtypes. The checkpoint is one
    ``model.safetensors``, or shards with an index.

    Raises:
        CheckpointError: A file cannot be read, or no name starts so.
    """
    tensors: dict[str, Tensor] = {}
    for path in _files(directory, prefix):
        tensors |= _read_file(path, prefix)
    if not tensors:
        raise CheckpointError(str(directory), f"no tensor is called {prefix}*")
    return tensors


def _files(directory: Path, prefix: str) -> list[Path]:
    if (directory / _WHOLE).exists() or not (directory / _INDEX).exists():
        return [directory / _WHOLE]
    shards = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(shards, dict):
        raise CheckpointError(str(directory / _INDEX), "it has no weight_map")
    return sorted(
        {directory / shards[name] for name in shards if name.startswith(prefix)}
    )


def _read_file(path: Path, prefix: str) -> dict[str, Tensor]:
    try:
        # safetensors calls any failure to open a missing file; open() tells them apart.
        path.open("rb").close()
        with safe_open(path, framework="pt", device="cpu") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    except OSError as exc:
        raise CheckpointError(str(path), exc.strerror or str(exc)) from exc
    except SafetensorError as exc:
        raise CheckpointError(str(path), str(exc)) from exc


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hex SHA-256 over names, dtypes, shapes and bytes; their order does not matter."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_tensors(
    wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], *, path: str
) -> None:
    """Refuse any difference in names and shapes.

    Raises:
        CheckpointError: Tensors are missing, left over or of another shape; up to
            eight of each are named.
    """
    problems = {
        "missing": sorted(wanted.keys() - given.keys()),
        "unexpected": sorted(given.keys() - wanted.keys()),
        "of another shape": [
            f"{name} {tuple(given[name].shape)} instead of {tuple(wanted[name].shape)}"
            for name in sorted(wanted.keys() & given.keys())
            if wanted[name].shape != given[name].shape
        ],
    }
    if any(problems.values()):
        raise CheckpointError(path, _describe(problems))


def assign_float32(
    module: nn.Module, tensors: Mapping[str, Tensor], *, path: str
) -> None:
    """Make these the module's parameters and buffers, in float32.

    Raises:
        CheckpointError: Tensors are missing, left over or of another shape; up to
            eight of each are named.
    """
    check_tensors(module.state_dict(), tensors, path=path)
    owned = {name: t.to(torch.float32, copy=True) for name, t in tensors.items()}
    module.load_state_dict(owned, strict=True, assign=True)
    module.requires_grad_(False).eval()


def _describe(problems: Mapping[str, list[str]]) -> str:
    parts: list[str] = []
    for kind, names in problems.items():
        if names:
            shown = ", ".join(names[:_NAMES_SHOWN])
            more = (
                f" and {len(names) - _NAMES_SHOWN} more" if names[_NAMES_SHOWN:] else ""
            )
            parts.append(f"{len(names)} tensors {kind}: {shown}{more}")
    return "; ".join(parts)
