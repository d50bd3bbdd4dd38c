"""Where the weights of an ``.onnx`` file are, read out of its bytes.

The format is Protocol Buffers. No more of it is read than leads to tensors, and none of
their numbers, so a file of a gigabyte takes milliseconds and no memory.

Source: ``onnx.proto`` of ONNX 1.19.
"""

from collections.abc import Iterator
from typing import Final

Value = int | memoryview

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}

# Message -> its fields that lead to tensors -> what these are.
_INSIDE: Final = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {
        5: "tensor",
        6: "graph",
        10: "tensor",
        11: "graph",
        22: "sparse",
        23: "sparse",
    },
    "sparse": {1: "tensor", 2: "tensor"},
}
_TENSOR, _DATA_LOCATION, _EXTERNAL = "tensor", 14, 1


def keeps_weights_elsewhere(model: memoryview) -> bool:
    """Tell whether a tensor of the model is in another file.

    Raises: ValueError, IndexError: these are not the bytes of one.
    """
    return any(_external(model, "model"))


def _external(message: memoryview, kind: str) -> Iterator[bool]:
    for number, value in _fields(message):
        if kind == _TENSOR:
            yield number == _DATA_LOCATION and value == _EXTERNAL
        elif (inside := _INSIDE[kind].get(number)) and isinstance(value, memoryview):
            yield from _external(value, inside)


def _fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """Number and value of each field; of numbers that are no varint, the bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire_type == _BYTES:
            size, at = _varint(message, at)
        elif (size := _FIXED_SIZES.get(wire_type, 0)) == 0:
            raise ValueError(f"a field of type {wire_type}")
        if at + size > len(message):
            raise ValueError("a field that is longer than its message")
        yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Seven bits a byte, the lowest first; and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
