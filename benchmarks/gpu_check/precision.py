"""Whether float32 on a device is float32."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.clips import noise
from benchmarks.gpu_check.determinism import Encode, bits
from vllm_tts_cache.speaker.precision import REDUCED, exact_float32, operations
from vllm_tts_cache.store.encoding import Array, Encoding

# Between what rounding in another order does (1e-6) and what TF32 does (1e-3).
MAX_DISTANCE = 1e-4
# TF32 convolutions change some 3 % of codes, see docs/precision.md.
MAX_OTHER_CODES = 0.01


def precisions(device: torch.device) -> dict[str, str]:
    """What torch says of float32 where encoders compute, though TF32 was asked for."""
    with tf32_asked_for(), exact_float32(device):
        return {
            what: setting.fp32_precision
            for what, setting in operations(device.type).items()
        }


def are_exact(found: Mapping[str, str]) -> bool:
    return REDUCED.isdisjoint(found.values())


def same_with_tf32_asked_for(encode: Encode, seconds: float) -> bool:
    """Whether a process that computes in TF32 gets the same bits from an encoder."""
    clip = noise(seconds)
    before = bits(encode(clip))
    with tf32_asked_for():
        return bits(encode(clip)) == before


@contextmanager
def tf32_asked_for() -> Iterator[None]:
    """Ask for TF32 in all of torch, as a model's server may."""
    backends: Any = torch.backends
    before = backends.fp32_precision
    backends.fp32_precision = "tf32"
    try:
        yield
    finally:
        backends.fp32_precision = before


def distances(found: Encoding, expected: Encoding) -> dict[str, float]:
    """How far each array is from another device's.

    Of real numbers the length of the difference as a share of the whole; of codes the
    share that is another one. Infinite where the shapes differ.
    """
    return {
        name: _distance(array, expected[name]) for name, array in found.arrays.items()
    }


def are_near(found: Encoding, far: Mapping[str, float]) -> bool:
    """Whether the distances are those of float32, and not of less."""
    return all(
        distance <= (MAX_DISTANCE if _is_real(found[name]) else MAX_OTHER_CODES)
        for name, distance in far.items()
    )


def _distance(found: Array, expected: Array) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if not _is_real(found):
        return float(np.mean(found != expected))
    one, other = found.astype(np.float64), expected.astype(np.float64)
    whole = float(np.linalg.norm(other))
    return float(np.linalg.norm(one - other)) / whole if whole else float("inf")


def _is_real(array: Array) -> bool:
    return np.issubdtype(array.dtype, np.floating)
