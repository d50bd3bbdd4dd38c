"""Reading some of a checkpoint's tensors, and the identity of what runs on them.

A start hashes the weights of every reference encoder, which is some of what it takes.
The next one finds the hashes in a file, where the weights' files stayed as they were:
the same by place, size and times, so that not even a file that was touched counts.
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
# Of both ends of each tensor: two of one name and shape are told apart by them.
_NUM_SAMPLED_BYTES = 4096
# A file that was written just now may be written again in the same tick of its clock.
_SETTLED_SECONDS = 10.0

Hash = Callable[[Mapping[str, Tensor]], str]

logger = logging.getLogger("vllm.vllm_tts_cache")

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_NAMES_SHOWN = 8
# What a quantised copy has in their place means nothing without its scales.
_WEIGHT_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


class WeightHashes:
    """What is known of the weights of one start.

    Args:
        path: Where it is kept, for later starts; it need not exist, and one that cannot
            be read is as good as none.
    """

    def __init__(self, path: Path):
        self._path = path
        self._known = _read(path)
        self._used: dict[str, str] = {}
        self._stamps: dict[str, list[int]] = {}
        self._are_settled = True

    def reads(self, path: Path) -> None:
        """Say that weights are about to be read from a file.

        Raises: OSError.
        """
        seen = path.stat()
        times = seen.st_mtime_ns, seen.st_ctime_ns
        self._stamps[str(path)] = [seen.st_dev, seen.st_ino, seen.st_size, *times]
        if time.time() - max(times) / 1e9 < _SETTLED_SECONDS:
            self._are_settled = False

    def sha256(self, tensors: Mapping[str, Tensor], compute: Hash) -> str:
        """The hash of tensors that were read from the files, computed if need be."""
        if not self._stamps or not self._are_settled:
            return compute(tensors)
        key = self._key(tensors)
        found = self._known.get(key)
        self._used[key] = found or compute(tensors)
        return self._used[key]

    def keep(self) -> None:
        """Keep for later starts what is new, and what was used before what was not."""
        if self._used.keys() <= self._known.keys():
            return
        every = {**self._used, **self._known}
        kept = dict(list(every.items())[:_NUM_KEPT])
        try:
            publish(self._path, json.dumps(kept, indent=1).encode())
        except StorageError as exc:
            logger.warning("The next start hashes the encoders' weights again: %s", exc)

    def _key(self, tensors: Mapping[str, Tensor]) -> str:
        digest = hashlib.sha256(json.dumps(self._stamps, sort_keys=True).encode())
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            for end in (flat[:_NUM_SAMPLED_BYTES], flat[-_NUM_SAMPLED_BYTES:]):
                digest.update(end.numpy().data)
        return digest.hexdigest()


_hashes: "ContextVar[WeightHashes | None]" = ContextVar("hashes", default=None)


@contextmanager
def remembered(directory: Path) -> Generator[None, None, None]:
    """Within it, weights that were hashed before are not hashed again.

    Args:
        directory: Where the hashes are kept.
    """
    hashes = WeightHashes(directory / HASHES_NAME)
    token = _hashes.set(hashes)
    try:
        yield
    finally:
        _hashes.reset(token)
    hashes.keep()


def reads(path: Path) -> None:
    """Say that weights are about to be read from a file.

    Raises: OSError.
    """
    if (hashes := _hashes.get()) is not None:
        hashes.reads(path)


def sha256_of(tensors: Mapping[str, Tensor], compute: Hash) -> str:
    """The hash of tensors: as it is remembered, or else computed."""
    if (hashes := _hashes.get()) is None:
        return compute(tensors)
    return hashes.sha256(tensors, compute)


def _read(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {key: value for key, value in known.items() if _is_hash(value)}


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and len(value) == hashlib.sha256().digest_size * 2


def read_tensors(directory: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with ``prefix``, under the rest of their names.

    They are on the CPU, in the checkpoint's dtypes. The checkpoint is one
    ``model.safetensors``, or shards with an index.

    Raises:
        CheckpointError: A file cannot be read, or no name starts so.
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
    """The tensors of one file whose names start with ``prefix``, as `read_tensors`.

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


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hex SHA-256 over names, dtypes, shapes and bytes; their order does not matter."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pick_tensors(
    wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], *, path: str
) -> dict[str, Tensor]:
    """The wanted tensors out of a file's; what is left over is one warning.

    A file may hold what only its training needed, and the host does not mind it.

    Args:
        wanted: Names, shapes and kinds, as of a network on the meta device.
        given: As in the file.
        path: Where they are from, for messages.

    Returns:
        Those of ``given`` that are wanted, as they are.

    Raises:
        CheckpointError: Tensors are missing, of another shape, or of a dtype that
            holds no plain weights; up to eight of each are named.
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
        The tensors that it took, as they were given: what a fingerprint is made of.

    Raises:
        CheckpointError: as `pick_tensors`, which leaves out what is left over.
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
    """64 lowercase hex digits over everything that can change an encoding's bytes.

    But for the device, see `ReferenceEncoder.fingerprint`. The family is not in it:
    two that run one network on one checkpoint's weights share its encodings.

    Args:
        network: What runs and what comes out of it: "qwen3 12 hz codec". Networks of
            one name take the same settings and give the same arrays.
        revision: Raised with any change of ours that changes what it computes.
        resampler: What brings audio to its rate.
        weights: The tensors that it runs on, as the checkpoint has them, before any
            cast.
        settings: All that it reads of the checkpoint's config, its rates, and what it
            does otherwise than the host; JSON types.
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
