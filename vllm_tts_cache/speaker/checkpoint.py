"""Reads tensors of a checkpoint, and computes the fingerprints of reference encoders.

A fingerprint has a hash of the weights. Hashing them takes time at a start, so the
hashes are stored in a file. A later start reuses one if the files of the weights have
the same place, size and times.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vllm_tts_cache.errors import CheckpointError, StorageError
from vllm_tts_cache.files import publish
from vllm_tts_cache.speaker.checkpoint_dir import read_json

HASHES_NAME = "weight-hashes.json"
_NUM_KEPT = 256
# Of both ends of each tensor, to distinguish two of one name and shape.
_NUM_SAMPLED_BYTES = 4096
# A file that was written just now may be written again in the same tick of the clock.
_SETTLED_SECONDS = 10.0

Hash = Callable[[Mapping[str, Tensor]], str]

logger = logging.getLogger("vllm.vllm_tts_cache")

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_NAMES_SHOWN = 8
# Weights of other dtypes are quantised, and mean nothing without their scales.
_WEIGHT_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


class _Hashes:
    """Hashes of the weights that one start reads.

    Attributes:
        known: From earlier starts, by files and tensors.
        used: Those of this start.
        stamps: Place, size and times of each file that this start reads.
        are_settled: Whether none of the files was written just now.
    """

    def __init__(self, known: dict[str, str]):
        self.known = known
        self.used: dict[str, str] = {}
        self.stamps: dict[str, list[int]] = {}
        self.are_settled = True


_hashes: ContextVar[_Hashes | None] = ContextVar("hashes", default=None)


@contextmanager
def remembered(directory: Path) -> Generator[None, None, None]:
    """Reuse hashes of weights from earlier starts inside the block, and store new ones.

    Args:
        directory: Where the hashes are stored; a file that cannot be read counts as
            empty.
    """
    path = directory / HASHES_NAME
    hashes = _Hashes(_read(path))
    token = _hashes.set(hashes)
    try:
        yield
    finally:
        _hashes.reset(token)
    if hashes.used.keys() <= hashes.known.keys():
        return
    kept = list({**hashes.used, **hashes.known}.items())[:_NUM_KEPT]
    try:
        publish(path, json.dumps(dict(kept), indent=1).encode())
    except StorageError as exc:
        logger.warning("The next start hashes the encoders' weights again: %s", exc)


def reads(path: Path) -> None:
    """Note that weights are about to be read from a file.

    Raises: OSError.
    """
    if (hashes := _hashes.get()) is None:
        return
    seen = path.stat()
    times = seen.st_mtime_ns, seen.st_ctime_ns
    hashes.stamps[str(path)] = [seen.st_dev, seen.st_ino, seen.st_size, *times]
    if time.time() - max(times) / 1e9 < _SETTLED_SECONDS:
        hashes.are_settled = False


def sha256_of(tensors: Mapping[str, Tensor], compute: Hash) -> str:
    """Return the hash of tensors: from an earlier start, or else computed."""
    hashes = _hashes.get()
    if hashes is None or not hashes.stamps or not hashes.are_settled:
        return compute(tensors)
    digest = hashlib.sha256(json.dumps(hashes.stamps, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(_head(name, tensor))
        data = _bytes(tensor)
        for end in (data[:_NUM_SAMPLED_BYTES], data[-_NUM_SAMPLED_BYTES:]):
            digest.update(end)
    key = digest.hexdigest()
    hashes.used[key] = hashes.known.get(key) or compute(tensors)
    return hashes.used[key]


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hex SHA-256 over names, dtypes, shapes and bytes, in any order of the tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(_head(name, tensor))
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _head(name: str, tensor: Tensor) -> bytes:
    return f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _read(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    size = hashlib.sha256().digest_size * 2
    return {k: v for k, v in known.items() if isinstance(v, str) and len(v) == size}


def read_tensors(directory: Path, prefix: str) -> dict[str, Tensor]:
    """Read the tensors whose names start with ``prefix``, by the rest of their names.

    They are on the CPU, in the checkpoint's dtypes. The checkpoint is one
    ``model.safetensors``, or shards with an index.

    Raises:
        CheckpointError: A file cannot be read, or has no such tensor.
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
    return sorted(
        {directory / shards[name] for name in shards if name.startswith(prefix)}
    )


def read_safetensors(path: Path, prefix: str) -> dict[str, Tensor]:
    """Read tensors of one file as `read_tensors` does.

    Raises: CheckpointError if it cannot be read.
    """
    try:
        # safetensors calls any failure to open a missing file; open() tells them apart.
        path.open("rb").close()
        reads(path)
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

    Args:
        wanted: Names, shapes and dtypes, as of a network on the meta device.
        given: All tensors of the file.
        path: Of the file, for messages.

    Raises:
        CheckpointError: Tensors are missing, of another shape, or quantised; up to
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

    Raises:
        CheckpointError: As `pick_tensors`.
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
    *,
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
        "weights": sha256_of(weights, weights_sha256),
        "compute_dtype": "float32",
        "resampler": resampler,
        "settings": dict(settings),
    }
    return _sha256(identity)


def _sha256(identity: Mapping[str, Any]) -> str:
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
