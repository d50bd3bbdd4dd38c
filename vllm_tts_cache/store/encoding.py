"""An encoding, the key that it is stored by, and its stored form.

That form is one safetensors file with a checksum and the key in it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType

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

    Chips and versions of torch round differently in the last bits, and an encoding is
    used wherever it was computed. This explains differences between two encodings.

    Attributes:
        device: Kind of device, in torch's words: ``cpu``, ``cuda``.
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

    def __init__(self, arrays: Mapping[str, Array], origin: ComputedOn | None = None):
        if not arrays:
            raise ValueError("an encoding has at least one array")
        kept = dict(sorted(arrays.items()))
        for name, array in kept.items():
            # A view of bytes, as read from a file, cannot change and needs no copy.
            if not (isinstance(array.base, bytes) and array.flags.c_contiguous):
                # A view of a caller's writable buffer could still change later.
                kept[name] = np.array(array, order="C", copy=True)
                kept[name].flags.writeable = False
        self.arrays = MappingProxyType(kept)
        self.num_bytes = sum(array.nbytes for array in kept.values())
        self.origin = origin

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingKey:
    """Everything that changes an encoding's bytes, and nothing else.

    Attributes:
        audio_sha256: Content address of the reference audio (rate and samples).
        encoder_fingerprint: Hex digest over all that changes what the encoder
            computes: weights, dtype, rates, resampler, attention, our revision.
            ``AUDIO`` for the stored form of the audio itself.
    """

    audio_sha256: str
    encoder_fingerprint: str

    @property
    def digest(self) -> str:
        """Hex SHA-256 of both parts; for logs and checks inside files."""
        canonical = f"{self.audio_sha256}/{self.encoder_fingerprint}"
        return hashlib.sha256(canonical.encode()).hexdigest()


# safetensors' name of a dtype -> the same in NumPy. safetensors would also write
# bfloat16, which NumPy cannot read back.
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
# Then comes the key.
_IDENTITY = '","audio_sha256":"{}","encoder_fingerprint":"{}"'
_DIGITS = slice(_SIZE_BYTES + len(_START), _SIZE_BYTES + len(_START) + 32)
_ORIGIN = tuple(field.name for field in fields(ComputedOn))


def encoding_to_bytes(key: EncodingKey, encoding: Encoding) -> bytes:
    """Serialize; equal encodings under one key give equal bytes.

    Raises: TypeError: An array's dtype cannot be stored.
    """
    arrays: dict[str, Array] = {}
    for name, array in encoding.arrays.items():
        little = array.dtype.newbyteorder("<")
        if little not in _DTYPES.values():
            raise TypeError(f"array {name!r} is {array.dtype}, which cannot be stored")
        arrays[name] = np.asarray(array, dtype=little, order="C")
    blob = save(arrays)
    end = _SIZE_BYTES + int.from_bytes(blob[:_SIZE_BYTES], "little")
    # safetensors writes metadata in the order of a hash map seeded per process, so
    # ours is put in front of the header that it wrote without metadata.
    identity = _IDENTITY.format(key.audio_sha256, key.encoder_fingerprint)
    header = _START + b"0" * 32 + identity.encode()
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

    Raises: EncodingCorruptError: ``blob`` is no encoding, has another key, or a byte
        that differs from what was written.
    """
    if not blob.startswith(_START, _SIZE_BYTES):
        raise EncodingCorruptError(key.digest, "not an encoding")
    if blob[_DIGITS] != _checksum(blob):
        raise EncodingCorruptError(key.digest, "checksum mismatch")
    identity = _IDENTITY.format(key.audio_sha256, key.encoder_fingerprint).encode()
    if not blob.startswith(identity, _DIGITS.stop):
        raise EncodingCorruptError(key.digest, "stored under another key")
    end = _SIZE_BYTES + int.from_bytes(blob[:_SIZE_BYTES], "little")
    try:
        # ``,ORIGIN},TENSORS}`` or ``},TENSORS}`` follows the identity: a brace for each
        # comma makes two JSON objects of it.
        text = "{" + blob[_DIGITS.stop + len(identity) : end].decode().removeprefix(",")
        metadata, length = json.JSONDecoder().raw_decode(text)
        tensors = json.loads("{" + text[length + 1 :])
        arrays: dict[str, Array] = {}
        for name, tensor in tensors.items():
            dtype, shape = _DTYPES[tensor["dtype"]], tensor["shape"]
            start = end + tensor["data_offsets"][0]
            arrays[name] = np.ndarray(shape, dtype, blob, start)
        # Reference audio has no origin: no encoder computed it.
        origin = {name: str(metadata[name]) for name in _ORIGIN} if metadata else None
        return Encoding(arrays, ComputedOn(**origin) if origin else None)
    except (KeyError, TypeError, ValueError) as exc:
        raise EncodingCorruptError(key.digest, f"not an encoding: {exc}") from exc


def _checksum(blob: bytes | bytearray) -> bytes:
    """Return XXH3-128 in hex over all of the file but these digits.

    It detects disk errors, not tampering: a writer of the directory can write a right
    checksum as well. SHA-256 would take longer than the read.
    """
    view = memoryview(blob)
    digest = xxh3_128(view[: _DIGITS.start])
    digest.update(view[_DIGITS.stop :])
    return digest.hexdigest().encode()
