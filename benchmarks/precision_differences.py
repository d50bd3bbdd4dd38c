"""How far an encoding is from the right one."""

from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]


def code_shares(given: Values, expected: Values) -> tuple[float, float]:
    """Shares of ``(num_frames, num_codebooks)`` codes that differ: of the first
    codebook, and of all others.

    Raises: ValueError if the shapes differ.
    """
    if given.shape != expected.shape:
        raise ValueError(f"codes of shape {given.shape} against {expected.shape}")
    differs = given != expected
    return float(differs[:, :1].mean()), float(differs[:, 1:].mean())


def embedding_difference(given: Values, expected: Values) -> dict[str, float]:
    """``max abs`` and ``1-cos`` between two embeddings, in double precision."""
    one, other = given.astype(np.float64), expected.astype(np.float64)
    # Not 1 minus the cosine, which has no digits left where they are nearly equal.
    between = one / np.linalg.norm(one) - other / np.linalg.norm(other)
    return {
        "max abs": float(np.abs(one - other).max()),
        "1-cos": float(between @ between / 2),
    }
