"""Stand-ins for the checkpoint's ONNX files, with their inputs and outputs.

Both tell clips apart, give outputs of the released ones' shapes, and are simpler:
layers of matrix products instead of attention.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, checker, helper, numpy_helper

from vllm_tts_cache.families.cosyvoice3.tiny import sizes
from vllm_tts_cache.families.cosyvoice3.tiny.sizes import NetworkSizes
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

_OPSET = 13
_IR_VERSION = 8
_BLOCK_GAIN = 0.5
_DIGIT_GAIN = 2.0  # makes each digit about equally frequent
_FLOAT, _INT32 = TensorProto.FLOAT, TensorProto.INT32

Shape = Sequence[int | str]


class _Graph:
    """Collects nodes; each has one output, which is named by the node."""

    def __init__(self, weights: WeightBuilder):
        self.weights = weights
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def add(self, kind: str, *inputs: str, name: str | None = None, **how: Any) -> str:
        output = name or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **how))
        return output

    def constant(self, name: str, value: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def matrix(self, name: str, inputs: int, outputs: int, gain: float = 1.0) -> str:
        drawn = self.weights.normal(name, (inputs, outputs), gain / math.sqrt(inputs))
        return self.constant(name, drawn.numpy())

    def add_blocks(self, x: str, size: NetworkSizes) -> str:
        """Add residual blocks, from ``(..., width)`` to the same shape."""
        for index in range(size.num_blocks):
            inner = self.matrix(f"block.{index}.in", size.width, size.inner)
            outer = self.matrix(
                f"block.{index}.out", size.inner, size.width, _BLOCK_GAIN
            )
            hidden = self.add("Tanh", self.add("MatMul", x, inner))
            x = self.add("Add", x, self.add("MatMul", hidden, outer))
        return x

    def save(
        self, path: Path, inputs: Sequence[ValueInfoProto], output: ValueInfoProto
    ) -> None:
        graph = helper.make_graph(
            self.nodes, path.stem, inputs, [output], self.constants
        )
        opset = helper.make_opsetid("", _OPSET)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION)
        checker.check_model(model)
        path.write_bytes(model.SerializeToString(deterministic=True))


def write_speech_tokenizer(
    path: Path, weights: WeightBuilder, size: NetworkSizes
) -> None:
    """Write a network of ``feats (1, 128, T)`` and length to ``indices (1, N)``."""
    graph = _Graph(weights)
    x = _add_halving(graph, "conv1", "feats", (size.width, sizes.TOKENIZER_MELS, 3))
    x = _add_halving(graph, "conv2", x, (size.width, size.width, 3))
    x = graph.add_blocks(graph.add("Transpose", x, perm=[0, 2, 1]), size)
    digits = graph.matrix("digits", size.width, sizes.NUM_DIGITS, _DIGIT_GAIN)
    x = graph.add("Tanh", graph.add("MatMul", x, digits))
    one = graph.constant("one", np.array(1, np.float32))
    x = graph.add("Add", graph.add("Round", x), one)
    places = 3.0 ** np.arange(sizes.NUM_DIGITS)
    x = graph.add("Mul", x, graph.constant("places", places.astype(np.float32)))
    last = graph.constant("last", np.array([2], np.int64))
    x = graph.add("ReduceSum", x, last, keepdims=0)
    graph.add("Cast", x, name="indices", to=_INT32)
    inputs = [
        _value("feats", _FLOAT, [1, sizes.TOKENIZER_MELS, "T"]),
        _value("feats_length", _INT32, [1]),
    ]
    graph.save(path, inputs, _value("indices", _INT32, [1, "N"]))


def write_speaker_network(
    path: Path, weights: WeightBuilder, size: NetworkSizes
) -> None:
    """Write a network of ``feat (B, T, 80)`` to ``embedding (B, 192)``."""
    graph = _Graph(weights)
    entry = graph.matrix("entry", sizes.NUM_MELS, size.width)
    # Its input has a mean of zero over time; the pooled values must not.
    x = graph.add("Abs", graph.add("MatMul", "feat", entry))
    x = graph.add_blocks(x, size)
    x = graph.add("ReduceMean", x, axes=[1], keepdims=0)
    exit_ = graph.matrix("exit", size.width, sizes.SPEAKER_SIZE)
    graph.add("MatMul", x, exit_, name="embedding")
    inputs = [_value("feat", _FLOAT, ["B", "T", sizes.NUM_MELS])]
    graph.save(path, inputs, _value("embedding", _FLOAT, ["B", sizes.SPEAKER_SIZE]))


def _add_halving(graph: _Graph, name: str, x: str, shape: tuple[int, int, int]) -> str:
    """Add a `centred` convolution that halves a length, rounded up."""
    weight = graph.constant(name, graph.weights.centred(name, shape).numpy())
    return graph.add("Tanh", graph.add("Conv", x, weight, strides=[2], pads=[1, 1]))


def _value(name: str, kind: int, shape: Shape) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)
