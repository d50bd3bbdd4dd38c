"""An encoding, the key that it is stored by, and its stored form.

That is one safetensors file that proves itself.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save
from xxhash import xxh3_128

from vllm_tts_cache.errors import EncodingCorruptError

Array = npt.NDArray[np.generic]

ADDRESS = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedOn:
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
    origin: ComputedOn | None

    def __init__(self, arrays: Mapping[str, Array], origin: ComputedOn | None = None):
        if not arrays:
            raise ValueError("an encoding has at least one array")
        kept = {name: _frozen(array) for name, array in sorted(arrays.items())}
        self.arrays = MappingProxyType(kept)
        self.num_bytes = sum(array.nbytes for array in kept.values())
        self.origin = origin

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def computed_by(self, origin: ComputedOn) -> "Encoding":
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
    return ADDRESS.fullmatch(text) is not None


# safetensors' name -> what both it and NumPy hold; it would also write bfloat16,
# which NumPy cannot read back.
_DTYPES = {
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "C64": np.dtype("<c8"),
    "BOOL": np.dtype(np.bool_),
}
_SIZE_BYTES = 8  # a safetensors file starts with its header's length
# The checksum comes first, so that it is found before anything is parsed.
_START = b'{"__metadata__":{"xxh3_128":"'
_DIGITS = slice(_SIZE_BYTES + len(_START), _SIZE_BYTES + len(_START) + 32)
_ORIGIN = tuple(field.name for field in fields(ComputedOn))


def encoding_to_bytes(key: EncodingKey, encoding: Encoding) -> bytes:
    """Serialize; equal encodings under one key give equal bytes.

    Raises: TypeError: An array's dtype cannot be stored.
    """
    blob = save({name: _storable(name, a) for name, a in encoding.arrays.items()})
    end = _header_end(blob)
    # safetensors writes metadata in the order of a hash map seeded per process, so
    # ours goes in front of what it wrote without any.
    header = _START + b"0" * 32 + _identity(key)
    if encoding.origin is not None:
        origin = json.dumps(asdict(encoding.origin), separators=(",", ":"))
        header += f",{origin[1:-1]}".encode()
    header = (header + b"}," + blob[_SIZE_BYTES + 1 : end]).rstrip()
    header = header.ljust(-(-len(header) // 8) * 8)  # readers map at multiples of 8
    filled = bytearray(
        len(header).to_bytes(_SIZE_BYTES, "little") + header + blob[end:]
    )
    filled[_DIGITS] = _checksum(filled)
    return bytes(filled)


def encoding_from_bytes(blob: bytes, key: EncodingKey) -> Encoding:
    """Verify and parse one stored encoding; its arrays are views of ``blob``.

    Raises:
        EncodingCorruptError: Not one of ours, stored under the wrong key, or some
            byte differs from what was written.
    """
    if not blob.startswith(_START, _SIZE_BYTES):
        raise EncodingCorruptError(key.digest, "not an encoding")
    if blob[_DIGITS] != _checksum(blob):
        raise EncodingCorruptError(key.digest, "checksum mismatch")
    identity = _identity(key)
    if not blob.startswith(identity, _DIGITS.stop):
        raise EncodingCorruptError(key.digest, "stored under another key")
    end = _header_end(blob)
    try:
        # The comma in front of the metadata's rest, and of the tensors, is where the
        # brace of its own was.
        text = "{" + blob[_DIGITS.stop + len(identity) : end].decode().removeprefix(",")
        metadata, length = json.JSONDecoder().raw_decode(text)
        tensors = json.loads("{" + text[length + 1 :])
        arrays = {name: _view(blob, end, t) for name, t in tensors.items()}
        # None of reference audio, which nothing computed.
        origin = {name: str(metadata[name]) for name in _ORIGIN} if metadata else None
        return Encoding(arrays, ComputedOn(**origin) if origin else None)
    except (KeyError, TypeError, ValueError) as exc:
        raise EncodingCorruptError(key.digest, f"not an encoding: {exc}") from exc


def _identity(key: EncodingKey) -> bytes:
    """What follows the checksum, in its one canonical form."""
    return (
        f'","audio_sha256":"{key.audio_sha256}",'
        f'"encoder_fingerprint":"{key.encoder_fingerprint}"'
    ).encode()


def _checksum(blob: bytes | bytearray) -> bytes:
    """XXH3-128 in hex over all of the file but these digits.

    It is there for disks that err, not for people who do: whoever can write the
    directory can write a right checksum. SHA-256 would take longer than the read.
    """
    view = memoryview(blob)
    digest = xxh3_128(view[: _DIGITS.start])
    digest.update(view[_DIGITS.stop :])
    return digest.hexdigest().encode()


def _view(blob: bytes, start: int, tensor: dict[str, Any]) -> Array:
    dtype, shape = _DTYPES[tensor["dtype"]], tensor["shape"]
    return np.ndarray(shape, dtype, blob, start + tensor["data_offsets"][0])


def _storable(name: str, array: Array) -> Array:
    little = array.dtype.newbyteorder("<")
    if little not in _DTYPES.values():
        raise TypeError(f"array {name!r} is {array.dtype}, which cannot be stored")
    return np.asarray(array, dtype=little, order="C")


def _header_end(blob: bytes) -> int:
    return _SIZE_BYTES + int.from_bytes(blob[:_SIZE_BYTES], "little")
