"""Write a tiny CosyVoice3 checkpoint with random weights. Not a model.

The weights of talker, flow and vocoder are float32, under the released names. The
stand-ins for the ONNX files have the inputs and outputs of the released ones, tell
clips apart, and are simpler: layers of matrix products instead of attention.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import NodeProto, TensorProto, ValueInfoProto, checker, helper, numpy_helper

from vllm_tts_cache.families.networks.torch_file import write_torch_file
from vllm_tts_cache.testing import tiny_checkpoint as tiny
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

# As released: they decide what is stored, and what the talker's ids mean.
NUM_CODES = 6_561
NUM_TALKER_IDS = NUM_CODES + 200
NUM_MELS = 80
SPEAKER_SIZE = 192
TOKENIZER_MELS = 128
NUM_DIGITS = 8  # of a code, each 0, 1 or 2

TALKER = tiny.TransformerSizes(
    hidden=128, intermediate=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32
)
# More than the text tokenizer's ids with the host's marks, and more than the codes:
# stock looks up running requests' codes here as well when another request begins.
TEXT_VOCAB_SIZE = 8_192

LOOKAHEAD_CHANNELS = 32
DIT_WIDTH, DIT_DEPTH, DIT_HEADS, DIT_HEAD_SIZE = 64, 2, 4, 16
VOCODER_CHANNELS = 32
PITCH_CHANNELS = 32


@dataclass(frozen=True, slots=True)
class NetworkSizes:
    """Widths of a stand-in's layers and of the middle of its residual blocks."""

    width: int
    inner: int
    num_blocks: int


# The released tokenizer has 242 million weights, and the speaker network 7 million.
TOKENIZER: dict[tiny.EncoderSize, NetworkSizes] = {
    "tiny": NetworkSizes(width=32, inner=64, num_blocks=1),
    "real": NetworkSizes(width=1_280, inner=7_680, num_blocks=12),
}
SPEAKER: dict[tiny.EncoderSize, NetworkSizes] = {
    "tiny": NetworkSizes(width=32, inner=64, num_blocks=1),
    "real": NetworkSizes(width=512, inner=1_536, num_blocks=4),
}

# Where the talker's config and the tokenizer are.
_TALKER_FOLDER = "CosyVoice-BlankEN"


def write(directory: Path, options: tiny.EncoderOptions, report: tiny.Report) -> None:
    """Fill an empty directory; called as the family's ``tiny_part``.

    With ``real`` encoders the stand-ins for the ONNX files have as many weights as the
    released ones, and about as many products for a second of audio; their layers are
    simpler. All else stays tiny.
    """
    # Empty as released: the host recognises the model by the folder's name.
    (directory / "config.json").write_text("{}\n")
    report("text tokenizer")
    talker = directory / _TALKER_FOLDER
    talker.mkdir()
    end_id = parts.write_text_tokenizer(talker)[parts.IM_END]
    parts.save_json(talker / "config.json", _talker_config(end_id))
    files = {"llm.pt": add_talker, "flow.pt": add_flow, "hift.pt": add_vocoder}
    for name, add in files.items():
        report(name)
        weights = WeightBuilder(options.seed)
        add(weights)
        write_torch_file(directory / name, weights.tensors)
    report("speech tokenizer")
    weights = WeightBuilder(options.seed).under("speech_tokenizer")
    path = directory / "speech_tokenizer_v3.onnx"
    write_speech_tokenizer(path, weights, TOKENIZER[options.encoders])
    report("speaker network")
    weights = WeightBuilder(options.seed).under("campplus")
    path = directory / "campplus.onnx"
    write_speaker_network(path, weights, SPEAKER[options.encoders])


def _talker_config(eos_token_id: int) -> dict[str, object]:
    """Return the config of the language model, which is a Qwen2."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **TALKER.config,
        "vocab_size": TEXT_VOCAB_SIZE,
        "max_position_embeddings": 4_096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": eos_token_id,
        "eos_token_id": eos_token_id,
    }


_POSITION_KERNEL, _POSITION_GROUPS = 31, 16
# Gain of the layers that modulate others by the time; their outputs include gates.
_MODULATION_GAIN = 0.5

_EMBEDDING_STD = 1.0
# Diffuse attention would dilute what few positions say of a voice and a text.
_ATTENTION_GAIN = 2.0
_LAYER_GAIN = 1.5
_RULES = {"bias": parts.constant(0.0), "[qk]_proj": parts.projected(_ATTENTION_GAIN)}
# The end's logit is log(200); with this much, one code in twenty ends a speech once it
# may. The likeliest 25 of as many normal draws lie between 2.7 and 3.8 deviations.
_CODE_GAIN = 1.75

_NUM_HARMONICS = 9
_NUM_BINS = 9  # of the short spectra at its end, each with a loudness and a phase
_UPSAMPLING = ((8, 16), (5, 11), (3, 7))
_DOWNSAMPLING = (15, 3, 1)
_SOURCE_KERNELS = (7, 7, 11)
_KERNELS = (3, 7, 11)
_NUM_DILATIONS = 3

_RESIDUAL_GAIN = 0.5
_UP_GAIN = 0.5  # neighbours are copies of one another, which add up
_SPECTRUM_GAIN = 0.5
_LOUDNESS = -1.5  # logarithm, of the spectra: neither silent nor clipped
_PITCH_HZ = 200.0


def add_talker(weights: WeightBuilder) -> None:
    """Add the language model, and the tables and the output of its codes.

    A speech ends by chance: the rows of the output that mean the end are zero, so its
    logit is the same in every step, among the likeliest dozen.
    """
    hidden = TALKER.hidden
    model = weights.under("llm.model.model")
    model.normal("embed_tokens.weight", (TEXT_VOCAB_SIZE, hidden), _EMBEDDING_STD)
    parts.add_layers(model, TALKER, "qwen2", parts.projected(_LAYER_GAIN), _RULES)
    shape = NUM_TALKER_IDS, hidden
    weights.normal("speech_embedding.weight", shape, _EMBEDDING_STD)
    output = weights.projection("llm_decoder.weight", shape, _CODE_GAIN)
    output[NUM_CODES:] = 0


def add_flow(weights: WeightBuilder) -> None:
    """Add the whole flow: from speech tokens and a vector to a mel."""
    mels = NUM_MELS
    weights.normal("input_embedding.weight", (NUM_CODES, mels), 1.0)
    weights.linear("spk_embed_affine_layer", SPEAKER_SIZE, mels, 8.0)
    lookahead = weights.under("pre_lookahead_layer")
    lookahead.conv("conv1", (LOOKAHEAD_CHANNELS, mels, 4))
    lookahead.conv("conv2", (mels, LOOKAHEAD_CHANNELS, 3))
    _add_estimator(weights.under("decoder.estimator"))


def _add_estimator(estimator: WeightBuilder) -> None:
    width, mels = DIT_WIDTH, NUM_MELS
    estimator.linear("time_embed.time_mlp.0", 256, width)
    estimator.linear("time_embed.time_mlp.2", width, width)
    # Its inputs are the noise, the reference's mel, the tokens and the speaker.
    estimator.linear("input_embed.proj", 4 * mels, width)
    for conv in ("conv1", "conv2"):
        shape = width, width // _POSITION_GROUPS, _POSITION_KERNEL
        estimator.conv(f"input_embed.conv_pos_embed.{conv}.0", shape)
    steps = torch.arange(0, DIT_HEAD_SIZE, 2).float() / DIT_HEAD_SIZE
    frequencies = estimator.fill("rotary_embed.inv_freq", steps.shape, 0.0)
    frequencies.copy_(1.0 / 10_000**steps)
    for index in range(DIT_DEPTH):
        _add_block(estimator.under(f"transformer_blocks.{index}"))
    estimator.linear("norm_out.linear", width, 2 * width, _MODULATION_GAIN)
    estimator.linear("proj_out", width, mels)


def _add_block(block: WeightBuilder) -> None:
    width, inner = DIT_WIDTH, DIT_HEADS * DIT_HEAD_SIZE
    block.linear("attn_norm.linear", width, 6 * width, _MODULATION_GAIN)
    for name in ("to_q", "to_k", "to_v"):
        block.linear(f"attn.{name}", width, inner)
    block.linear("attn.to_out.0", inner, width)
    block.linear("ff.ff.0.0", width, 2 * width)
    block.linear("ff.ff.2", 2 * width, width)


def add_vocoder(weights: WeightBuilder) -> None:
    """Add all of ``hift.pt``: from a mel to samples."""
    width = VOCODER_CHANNELS
    weights.linear("m_source.l_linear", _NUM_HARMONICS, 1)
    _add_normed(weights, "conv_pre", (width, NUM_MELS, 5))
    for stage, (_, kernel) in enumerate(_UPSAMPLING):
        channels = width // 2 ** (stage + 1)
        _add_normed(weights, f"ups.{stage}", (channels, 2 * channels, kernel), _UP_GAIN)
        # Layers that bring the source's tone to the rate of the stage.
        rate = _DOWNSAMPLING[stage]
        shape = channels, 2 * _NUM_BINS, 1 if rate == 1 else 2 * rate
        weights.conv(f"source_downs.{stage}", shape)
        source = weights.under(f"source_resblocks.{stage}")
        _add_residual(source, channels, _SOURCE_KERNELS[stage])
        for index, kernel_size in enumerate(_KERNELS):
            block = weights.under(f"resblocks.{stage * len(_KERNELS) + index}")
            _add_residual(block, channels, kernel_size)
    shape = 2 * _NUM_BINS, width // 2 ** len(_UPSAMPLING), 7
    _add_normed(weights, "conv_post", shape, _SPECTRUM_GAIN)
    weights.tensors["conv_post.bias"][:_NUM_BINS] = _LOUDNESS
    _add_pitch(weights.under("f0_predictor"))


def _add_residual(block: WeightBuilder, channels: int, kernel: int) -> None:
    for index in range(_NUM_DILATIONS):
        for half in ("1", "2"):
            block.fill(f"activations{half}.{index}.alpha", (channels,), 1.0)
            shape = channels, channels, kernel
            _add_normed(block, f"convs{half}.{index}", shape, _RESIDUAL_GAIN)


def _add_pitch(predictor: WeightBuilder) -> None:
    inputs = NUM_MELS
    for index, kernel in zip(range(0, 10, 2), (4, 3, 3, 3, 3), strict=True):
        shape = PITCH_CHANNELS, inputs, kernel
        _add_normed(predictor, f"condnet.{index}", shape)
        inputs = PITCH_CHANNELS
    predictor.linear("classifier", inputs, 1, _PITCH_HZ)


def _add_normed(
    weights: WeightBuilder, name: str, shape: tuple[int, int, int], gain: float = 1.0
) -> None:
    """Add a weight-normed convolution ``(out, in, kernel)``, parametrized as in torch.

    Inputs of unit variance come out with a standard deviation of ``gain``.
    """
    parameters = weights.under(f"{name}.parametrizations.weight")
    parameters.fill("original0", (shape[0], 1, 1), gain)
    parameters.normal("original1", shape, 1.0)
    weights.fill(f"{name}.bias", shape[:1], 0.0)


_BLOCK_GAIN = 0.5
_DIGIT_GAIN = 2.0  # makes each digit about equally frequent
_FLOAT, _INT32 = TensorProto.FLOAT, TensorProto.INT32
_value = helper.make_tensor_value_info


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
        opset = helper.make_opsetid("", 13)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=8)
        checker.check_model(model)
        path.write_bytes(model.SerializeToString(deterministic=True))


def write_speech_tokenizer(
    path: Path, weights: WeightBuilder, size: NetworkSizes
) -> None:
    """Write a network of ``feats (1, 128, T)`` and length to ``indices (1, N)``."""
    graph = _Graph(weights)
    x = _add_halving(graph, "conv1", "feats", (size.width, TOKENIZER_MELS, 3))
    x = _add_halving(graph, "conv2", x, (size.width, size.width, 3))
    x = graph.add_blocks(graph.add("Transpose", x, perm=[0, 2, 1]), size)
    digits = graph.matrix("digits", size.width, NUM_DIGITS, _DIGIT_GAIN)
    x = graph.add("Tanh", graph.add("MatMul", x, digits))
    one = graph.constant("one", np.array(1, np.float32))
    x = graph.add("Add", graph.add("Round", x), one)
    places = 3.0 ** np.arange(NUM_DIGITS)
    x = graph.add("Mul", x, graph.constant("places", places.astype(np.float32)))
    last = graph.constant("last", np.array([2], np.int64))
    x = graph.add("ReduceSum", x, last, keepdims=0)
    graph.add("Cast", x, name="indices", to=_INT32)
    feats = _value("feats", _FLOAT, [1, TOKENIZER_MELS, "T"])
    length = _value("feats_length", _INT32, [1])
    graph.save(path, [feats, length], _value("indices", _INT32, [1, "N"]))


def write_speaker_network(
    path: Path, weights: WeightBuilder, size: NetworkSizes
) -> None:
    """Write a network of ``feat (B, T, 80)`` to ``embedding (B, 192)``."""
    graph = _Graph(weights)
    entry = graph.matrix("entry", NUM_MELS, size.width)
    # Its input has a mean of zero over time; the pooled values must not.
    x = graph.add("Abs", graph.add("MatMul", "feat", entry))
    x = graph.add_blocks(x, size)
    x = graph.add("ReduceMean", x, axes=[1], keepdims=0)
    exit_ = graph.matrix("exit", size.width, SPEAKER_SIZE)
    graph.add("MatMul", x, exit_, name="embedding")
    inputs = [_value("feat", _FLOAT, ["B", "T", NUM_MELS])]
    graph.save(path, inputs, _value("embedding", _FLOAT, ["B", SPEAKER_SIZE]))


def _add_halving(graph: _Graph, name: str, x: str, shape: tuple[int, int, int]) -> str:
    """Add a `centred` convolution that halves a length, rounded up."""
    weight = graph.constant(name, graph.weights.centred(name, shape).numpy())
    return graph.add("Tanh", graph.add("Conv", x, weight, strides=[2], pads=[1, 1]))
