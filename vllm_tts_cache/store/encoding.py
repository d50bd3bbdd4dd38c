"""The value of an encoding."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What computed an encoding; for people, and no part of its key.

    Chips and versions of torch round otherwise in the last bits, and an encoding of
    another one is taken as it is. Who compares two wants to know.

    Attributes:
        device: Kind of device, as torch calls it: ``cpu``, ``cuda``.
        device_name: The chip.
        torch_version: With its build: ``2.13.0+cpu``.
    """

    device: str
    device_name: str
    torch_version: str


class Encoding:
    """One encoder's named arrays for one audio; immutable, so it is safe to share.

    NumPy rather than torch, because a NumPy array can be made read-only: one
    caller that scales an embedding in place must not change every later answer.
    """

    __slots__ = ("arrays", "num_bytes", "origin")

    arrays: Mapping[str, Array]
    num_bytes: int
    origin: Origin | None

    def __init__(self, arrays: Mapping[str, Array], origin: Origin | None = None):
        if not arrays:
            raise ValueError("an encoding has at least one array")
        kept = {name: _frozen(array) for name, array in sorted(arrays.items())}
        self.arrays = MappingProxyType(kept)
        self.num_bytes = sum(array.nbytes for array in kept.values())
        self.origin = origin

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def computed_by(self, origin: Origin) -> "Encoding":
        """The same arrays, and what computed them."""
        return Encoding(self.arrays, origin)


def _frozen(array: Array) -> Array:
    # Read from a file: nobody can write to bytes, so there is no need for a copy.
    if isinstance(array.base, bytes) and array.flags.c_contiguous:
        return array
    # A view of somebody's writable buffer could still change underneath us.
    owned = np.array(array, order="C", copy=True)
    owned.flags.writeable = False
    return owned
