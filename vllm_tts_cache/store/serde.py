"""Stored form of an encoding: one safetensors file that proves itself."""

import json
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from safetensors.numpy import save
from xxhash import xxh3_128

from vllm_tts_cache.errors import EncodingCorruptError
from vllm_tts_cache.store.encoding import Array, Encoding, EncodingKey, Origin

# Part of every stored path, so that a new format never meets an old file.
FORMAT_VERSION = 2

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
_ORIGIN = tuple(field.name for field in fields(Origin))


def encode(key: EncodingKey, encoding: Encoding) -> bytes:
    """Serialize; equal encodings under one key give equal bytes.

    Raises:
        TypeError: An array's dtype cannot be stored.
    """
    blob = save({name: _storable(name, a) for name, a in encoding.arrays.items()})
    end = _header_end(blob)
    # safetensors writes metadata in the order of a hash map seeded per process, so
    # ours goes in front of what it wrote without any.
    header = _START + b"0" * 32 + _identity(key) + _rest_of_metadata(encoding.origin)
    header = (header + b"," + blob[_SIZE_BYTES + 1 : end]).rstrip()
    header = header.ljust(-(-len(header) // 8) * 8)  # readers map at multiples of 8
    filled = bytearray(
        len(header).to_bytes(_SIZE_BYTES, "little") + header + blob[end:]
    )
    filled[_DIGITS] = _checksum(filled)
    return bytes(filled)


def is_encoding(blob: bytes) -> bool:
    """Whether the bytes begin as ours do; they may still be corrupt."""
    return blob.startswith(_START, _SIZE_BYTES)


def decode(blob: bytes, key: EncodingKey) -> Encoding:
    """Verify and parse one stored encoding; its arrays are views of ``blob``.

    Raises:
        EncodingCorruptError: Not one of ours, stored under the wrong key, or some
            byte differs from what was written.
    """
    if not is_encoding(blob):
        raise EncodingCorruptError(key.digest, "not an encoding")
    if blob[_DIGITS] != _checksum(blob):
        raise EncodingCorruptError(key.digest, "checksum mismatch")
    identity = _identity(key)
    if not blob.startswith(identity, _DIGITS.stop):
        raise EncodingCorruptError(key.digest, "stored under another key")
    end = _header_end(blob)
    try:
        metadata, tensors = _parse(blob[_DIGITS.stop + len(identity) : end].decode())
        arrays = {name: _view(blob, end, t) for name, t in tensors.items()}
        return Encoding(arrays, _origin(metadata))
    except (KeyError, TypeError, ValueError) as exc:
        raise EncodingCorruptError(key.digest, f"not an encoding: {exc}") from exc


def _identity(key: EncodingKey) -> bytes:
    """What follows the checksum, in its one canonical form."""
    return (
        f'","audio_sha256":"{key.audio_sha256}",'
        f'"encoder_fingerprint":"{key.encoder_fingerprint}"'
    ).encode()


def _rest_of_metadata(origin: Origin | None) -> bytes:
    """From behind the identity to the brace that ends the metadata."""
    if origin is None:
        return b"}"
    return b"," + json.dumps(asdict(origin), separators=(",", ":"))[1:].encode()


def _parse(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata behind the identity, and the tensors.

    The comma in front of either is where the brace of its own was.
    """
    text = "{" + text.removeprefix(",")
    metadata, length = json.JSONDecoder().raw_decode(text)
    return metadata, json.loads("{" + text[length + 1 :])


def _origin(metadata: dict[str, Any]) -> Origin | None:
    """None of files from before it was written, and of reference audio."""
    if not metadata:
        return None
    return Origin(**{name: str(metadata[name]) for name in _ORIGIN})


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
