"""Reads tensors of a checkpoint, and computes fingerprints of reference encoders."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.logs import logger
from vllm_tts_cache.speaker.checkpoint_dir import read_json

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_NAMES_SHOWN = 8
# Weights of other dtypes are quantised, and mean nothing without their scales.
_WEIGHT_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hex SHA-256 over names, dtypes, shapes and bytes, in any order of the tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        flat = tensor.contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(directory: Path, prefix: str) -> dict[str, Tensor]:
    """Read the tensors whose names start with ``prefix``, by the rest of their names.

    They are on the CPU, in the checkpoint's dtypes. The checkpoint is one
    ``model.safetensors``, or shards with an index.

    Raises: CheckpointError: A file cannot be read, or has no such tensor.
    """
    tensors: dict[str, Tensor] = {}
    for path in _files(directory, prefix):
        tensors |= read_safetensors(path, prefix)
    if not tensors:
        raise CheckpointError(str(directory), f"no tensor is called {prefix}*")
    return tensors


def _files(directory: Path, prefix: str) -> list[Path]:
    if (directory / _WHOLE).exists() or not (directory / _INDEX).exists():
        return [directory / _WHOLE]
    shards = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(shards, dict):
        raise CheckpointError(str(directory / _INDEX), "it has no weight_map")
    files = {shards[name] for name in shards if name.startswith(prefix)}
    return sorted({directory / file for file in files})


def read_safetensors(path: Path, prefix: str) -> dict[str, Tensor]:
    """Read tensors of one file as `read_tensors` does.

    Raises: CheckpointError if the file cannot be read.
    """
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


def pick_tensors(
    wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], *, path: str
) -> dict[str, Tensor]:
    """Return the wanted tensors of a file; log one warning for the others.

    A file may hold tensors that only its training needed, as the host accepts it.
    ``wanted`` has names, shapes and dtypes, as of a network on the meta device.

    Raises: CheckpointError: Tensors are missing, of another shape, or quantised; up to
        eight of each are named.
    """
    shared = sorted(wanted.keys() & given.keys())
    problems = {
        "missing": sorted(wanted.keys() - given.keys()),
        "of another shape": [
            f"{name} {tuple(given[name].shape)} instead of {tuple(wanted[name].shape)}"
            for name in shared
            if wanted[name].shape != given[name].shape
        ],
        "quantised": [
            f"{name} {str(given[name].dtype).removeprefix('torch.')}"
            for name in shared
            if wanted[name].is_floating_point()
            and given[name].dtype not in _WEIGHT_DTYPES
        ],
    }
    if any(problems.values()):
        kinds = [_listed(names, kind) for kind, names in problems.items() if names]
        raise CheckpointError(path, "; ".join(kinds))
    if extra := sorted(given.keys() - wanted.keys()):
        logger.warning("%s: %s", path, _listed(extra, "unexpected and left out"))
    return {name: given[name] for name in shared}


def assign_float32(
    module: nn.Module, tensors: Mapping[str, Tensor], *, path: str
) -> dict[str, Tensor]:
    """Make these the module's parameters and buffers, in float32.

    Returns:
        Those that the module has, as they were given, for a fingerprint.

    Raises: CheckpointError: As `pick_tensors`.
    """
    taken = pick_tensors(module.state_dict(), tensors, path=path)
    owned = {name: t.to(torch.float32, copy=True) for name, t in taken.items()}
    module.load_state_dict(owned, strict=True, assign=True)
    module.requires_grad_(False).eval()
    return taken


def _listed(names: list[str], kind: str) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if names[_NAMES_SHOWN:] else ""
    return f"{len(names)} tensors {kind}: {shown}{more}"


def encoder_fingerprint(
    network: str,
    revision: int,
    resampler: str,
    weights: Mapping[str, Tensor],
    settings: Mapping[str, Any],
) -> str:
    """Return 64 lowercase hex digits over all that can change an encoding's bytes.

    All but the device, see `ReferenceEncoder.fingerprint`. Two families that run one
    network on the same weights share encodings, so the family is not in it.

    Args:
        network: As "qwen3 12 hz codec"; networks of one name take the same settings
            and return the same arrays.
        revision: Raised with any change of ours that changes the bytes.
        resampler: Brings audio to the network's rate.
        weights: Of the network, as the checkpoint has them, before any cast.
        settings: All that the network reads of the checkpoint's config, its rates, and
            its differences from the host; JSON types.
    """
    identity = {
        "network": network,
        "revision": revision,
        "weights": weights_sha256(weights),
        "compute_dtype": "float32",
        "resampler": resampler,
        "settings": dict(settings),
    }
    return _sha256(identity)


def _sha256(identity: Mapping[str, Any]) -> str:
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
