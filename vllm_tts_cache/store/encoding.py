"""An encoding, and the key that it is stored by."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from vllm_tts_cache.errors import StorageError

Array = npt.NDArray[np.generic]

_ADDRESS = re.compile(r"[0-9a-f]{64}")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingKey:
    """Everything that changes an encoding's bytes, and nothing else.

    Attributes:
        audio_sha256: Content address of the reference audio (rate and samples).
        encoder_fingerprint: Hex digest over all that changes what the encoder
            computes: weights, dtype, rates, resampler, attention, our revision.
            ``AUDIO_KIND`` for the stored form of the audio itself.
    """

    audio_sha256: str
    encoder_fingerprint: str

    @property
    def digest(self) -> str:
        """Hex SHA-256 of both parts; for logs and checks inside files."""
        canonical = f"{self.audio_sha256}/{self.encoder_fingerprint}"
        return hashlib.sha256(canonical.encode()).hexdigest()


def is_address(text: str) -> bool:
    """Whether it is 64 lower-case hex digits."""
    return _ADDRESS.fullmatch(text) is not None


def checked_address(text: str) -> str:
    """Return it; keys arrive over RPC, and none may name a path of its own choosing.

    Raises:
        StorageError: It is not 64 lower-case hex digits.
    """
    if not is_address(text):
        raise StorageError(f"Not a content address: {text[:80]!r}")
    return text
