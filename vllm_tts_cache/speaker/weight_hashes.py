"""Hashes of weights, remembered while the files that they are from stay as they are.

A start hashes the weights of every reference encoder, which is some of what it takes;
the next one finds the hashes here. A file counts as the same by its place, size and
times: not even one that was touched does.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor

from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.files import publish

logger = logging.getLogger("vllm.vllm_tts_cache")

FILE_NAME = "weight-hashes.json"
_NUM_KEPT = 256
# Of both ends of each tensor: two of one name and shape are told apart by them.
_NUM_SAMPLED_BYTES = 4096
# A file that was written just now may be written again in the same tick of its clock.
_SETTLED_SECONDS = 10.0

Hash = Callable[[Mapping[str, Tensor]], str]


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
    hashes = WeightHashes(directory / FILE_NAME)
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
