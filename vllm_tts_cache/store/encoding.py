"""The value of an encoding."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


class Encoding:
    """One encoder's named arrays for one audio; immutable, so it is safe to share.

    NumPy rather than torch, because a NumPy array can be made read-only: one
    caller that scales an embedding in place must not change every later answer.
    """

    __slots__ = ("arrays", "num_bytes")

    arrays: Mapping[str, Array]
    num_bytes: int

    def __init__(self, arrays: Mapping[str, Array]):
        if not arrays:
            raise ValueError("an encoding has at least one array")
        kept = {name: _frozen(array) for name, array in sorted(arrays.items())}
        self.arrays = MappingProxyType(kept)
        self.num_bytes = sum(array.nbytes for array in kept.values())

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]


def _frozen(array: Array) -> Array:
    # Read from a file: nobody can write to bytes, so there is no need for a copy.
    if isinstance(array.base, bytes) and array.flags.c_contiguous:
        return array
    # A view of somebody's writable buffer could still change underneath us.
    owned = np.array(array, order="C", copy=True)
    owned.flags.writeable = False
    return owned
