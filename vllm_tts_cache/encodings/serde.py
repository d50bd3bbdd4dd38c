"""Stored form of an encoding: one safetensors file that proves itself."""

import hashlib
import json
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vllm_tts_cache.encodings.key import EncodingKey
from vllm_tts_cache.encodings.value import Array, Encoding
from vllm_tts_cache.errors import EncodingCorruptError

# Part of every stored path, so that a new format never meets an old file.
FORMAT_VERSION = 1

# What safetensors both writes from and reads into NumPy; it would also write
# bfloat16 and then fail to read it back.
_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_DTYPES = _INTEGERS | {"bool", "float16", "float32", "float64", "complex64"}
_SIZE_BYTES = 8  # a safetensors file starts with its header's length


def encode(key: EncodingKey, encoding: Encoding) -> bytes:
    """Serialize; equal encodings under one key give equal bytes.

    Raises:
        TypeError: An array's dtype cannot be stored.
    """
    arrays = {name: _storable(name, a) for name, a in encoding.arrays.items()}
    blob = save(arrays, metadata=_metadata(key, arrays))
    end = _header_end(blob)
    header = _canonical(json.loads(blob[_SIZE_BYTES:end]))
    return blob[:_SIZE_BYTES] + header.ljust(end - _SIZE_BYTES) + blob[end:]


def decode(blob: bytes, key: EncodingKey) -> Encoding:
    """Parse and verify one stored encoding.

    Raises:
        EncodingCorruptError: Not safetensors, stored under the wrong key, or some
            byte differs from what was written.
    """
    try:
        arrays = load(blob)
        header = json.loads(blob[_SIZE_BYTES : _header_end(blob)])
        stored = header["__metadata__"]
        expected = _metadata(key, arrays)
        encoding = Encoding(arrays)
    except (SafetensorError, KeyError, ValueError) as exc:
        raise EncodingCorruptError(key.digest, f"not an encoding: {exc}") from exc
    if {**stored, "content_sha256": ""} != {**expected, "content_sha256": ""}:
        raise EncodingCorruptError(key.digest, "stored under another key")
    if stored.get("content_sha256") != expected["content_sha256"]:
        raise EncodingCorruptError(key.digest, "checksum mismatch")
    # A space of the padding that turned into a tab changes neither key nor content.
    if _canonical(header) != blob[_SIZE_BYTES : _header_end(blob)].rstrip(b" "):
        raise EncodingCorruptError(key.digest, "altered header")
    return encoding


def content_sha256(arrays: dict[str, Array]) -> str:
    """Hex SHA-256 over each array's name, dtype, shape and bytes, in name order."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        description = [name, array.dtype.name, *array.shape]
        digest.update(json.dumps(description).encode())
        digest.update(array.data)
    return digest.hexdigest()


def _metadata(key: EncodingKey, arrays: dict[str, Array]) -> dict[str, str]:
    return {
        "key": key.digest,
        "audio_sha256": key.audio_sha256,
        "encoder_fingerprint": key.encoder_fingerprint,
        "content_sha256": content_sha256(arrays),
    }


def _storable(name: str, array: Array) -> Array:
    if array.dtype.name not in _DTYPES:
        raise TypeError(f"array {name!r} is {array.dtype}, which cannot be stored")
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _header_end(blob: bytes) -> int:
    return _SIZE_BYTES + int.from_bytes(blob[:_SIZE_BYTES], "little")


def _canonical(header: dict[str, Any]) -> bytes:
    # safetensors writes metadata in the order of a hash map seeded per process.
    metadata = dict(sorted(header["__metadata__"].items()))
    ordered = {**header, "__metadata__": metadata}
    return json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode()
