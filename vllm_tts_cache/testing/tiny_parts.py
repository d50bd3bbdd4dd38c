"""The parts of tiny checkpoints: random weights, and byte-level tokenizers.

A weight depends on a seed and its own name alone. The tokenizers have the size of a
released vocabulary, or the layout of Qwen's.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from torch import Tensor, nn

from vllm_tts_cache.testing.tiny_checkpoint import TransformerSizes

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
# Those of every Qwen tokenizer.
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)

# How Qwen's tokenizers cut a text into words; public with every Qwen checkpoint.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The prompt's template needs each role to be one token: the training text repeats it.
_ROLES = ("assistant", "user", "system")
_PROSE = (
    "Hello world, this is a small test of the speech that a server sends while it "
    "speaks. One voice reads what another voice has written, and the listener hears "
    "who it was. The weather was fine in the morning, but there is rain at the other "
    "end of the street. We have been waiting for the train since eight, and nobody "
    "can say when it will come. Please leave your name and your number after the tone."
)
_VOCAB_SIZE = 480


@dataclass(frozen=True, slots=True)
class WeightBuilder:
    """Collects the named tensors of a state dict.

    Every tensor is drawn from a generator of its own, seeded with its full name:
    adding a layer, or another order of the calls, changes no other weight.
    """

    seed: int
    prefix: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def under(self, prefix: str) -> "WeightBuilder":
        """Return a view that puts ``prefix`` and a dot before every name."""
        return WeightBuilder(self.seed, f"{self.prefix}{prefix}.", self.tensors)

    def normal(self, name: str, shape: Sequence[int], std: float = 1.0) -> Tensor:
        """Add ``name``, float32, drawn from N(0, std^2)."""
        drawn = torch.randn(shape, generator=self._generator(name))
        return self._add(name, drawn * std)

    def log_uniform(
        self, name: str, shape: Sequence[int], low: float, high: float
    ) -> Tensor:
        """Add ``name``, float32, its logarithm uniform in [low, high)."""
        draw = torch.rand(shape, generator=self._generator(name))
        return self._add(name, torch.exp(low + (high - low) * draw))

    def projection(self, name: str, shape: Sequence[int], gain: float = 1.0) -> Tensor:
        """Add a linear or convolution weight ``(out, in, ...)``.

        Inputs of unit variance come out with a standard deviation of ``gain``.
        """
        return self.normal(name, shape, gain / math.sqrt(math.prod(shape[1:])))

    def centred(self, name: str, shape: Sequence[int], gain: float = 1.0) -> Tensor:
        """Add a projection that ignores a constant that all its inputs share.

        Random layers after a rectifier, or after log-mel energies, otherwise pass on
        mostly that constant, so that outputs hardly differ.
        """
        weight = self.projection(name, shape, gain)
        weight -= weight.mean(dim=tuple(range(1, len(shape))), keepdim=True)
        return weight

    def linear(
        self, name: str, inputs: int, outputs: int, gain: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Add weight and bias of a linear layer, the latter 0."""
        return self.conv(name, (outputs, inputs), gain)

    def conv(
        self, name: str, shape: Sequence[int], gain: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Add weight ``(out, in, ...)`` and bias of a layer, the latter 0."""
        weight = self.projection(f"{name}.weight", shape, gain)
        return weight, self.fill(f"{name}.bias", shape[:1], 0.0)

    def fill(self, name: str, shape: Sequence[int], value: float) -> Tensor:
        """Add ``name``, float32, constant."""
        return self._add(name, torch.full(tuple(shape), value))

    def _add(self, name: str, tensor: Tensor) -> Tensor:
        self.tensors[self.prefix + name] = tensor
        return tensor

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}:{self.prefix}{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def shapes_of(
    network: Callable[[Any], nn.Module], config: object
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a class's tensors, by the names in its state dict."""
    with torch.device("meta"):
        state = network(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


# Adds a tensor to a builder, by its name there and its shape.
Draw = Callable[[WeightBuilder, str, Sequence[int]], object]


def add_all(
    weights: WeightBuilder,
    shapes: Mapping[str, Sequence[int]],
    rules: Mapping[str, Draw],
) -> None:
    """Add a tensor of each shape by the first rule whose pattern is in its name."""
    for name, shape in shapes.items():
        draw = next(d for pattern, d in rules.items() if re.search(pattern, name))
        draw(weights, name, shape)


def _by(draw: Callable[..., Tensor]) -> Callable[..., Draw]:
    return lambda *options: (
        lambda weights, name, shape: draw(weights, name, shape, *options)
    )


# Each returns a `Draw` by a method of the builder, with the method's last argument.
constant, projected = _by(WeightBuilder.fill), _by(WeightBuilder.projection)
centred, normal = _by(WeightBuilder.centred), _by(WeightBuilder.normal)


def add_layers(
    model: WeightBuilder,
    size: TransformerSizes,
    kind: str,
    project: Draw,
    rules: Mapping[str, Draw] = {},
) -> None:
    """Add decoder layers and the last norm of a ``model_type`` of transformers.

    What no rule matches is a norm, which weighs 1, or a projection.
    """
    from transformers import MODEL_MAPPING, AutoConfig

    sizes = {**size.config, "head_dim": size.head_dim, "vocab_size": 1}
    config = AutoConfig.for_model(kind, **sizes)
    # The class is looked up before the device is the meta one: that imports torchaudio,
    # whose constants would be meta tensors for the rest of the process.
    network: Any = MODEL_MAPPING[type(config)]
    shapes = shapes_of(network, config)
    del shapes["embed_tokens.weight"]
    add_all(model, shapes, {**rules, "norm": constant(1.0), "": project})


def save_weights(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write a safetensors file that transformers and vLLM accept."""
    cast = {name: tensors[name].to(dtype).contiguous() for name in sorted(tensors)}
    save_file(cast, path, metadata={"format": "pt"})


def save_byte_tokenizer(
    out: Path,
    control_ids: Mapping[str, int],
    *,
    end: str,
    pad: str,
    vocab_size: int | None = None,
    **more: str,
) -> None:
    """Write ``tokenizer.json`` and the two files that say which tokens are special.

    ``control_ids`` are above the ids of the bytes; without a ``vocab_size`` they are
    the last ids. ``more`` are fields of ``tokenizer_config.json``.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: token_id for token_id, symbol in enumerate(alphabet)}
    vocab |= control_ids
    # The library complains at length about every id that is left out.
    all_ids = range(vocab_size or max(control_ids.values()) + 1)
    unused = sorted(set(all_ids) - set(vocab.values()))
    vocab |= {f"<|unused:{token_id}|>": token_id for token_id in unused}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_special(token) for token in control_ids])
    tokenizer.save(str(out / "tokenizer.json"))
    ends = {"eos_token": end, "pad_token": pad}
    save_json(out / "special_tokens_map.json", ends)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32_768,
        "clean_up_tokenization_spaces": False,
        **ends,
        **more,
    }
    save_json(out / "tokenizer_config.json", config)


def _special(token: str) -> AddedToken:
    return AddedToken(token, special=True, normalized=False)


def save_json(path: Path, value: object) -> None:
    """Write a JSON file as released checkpoints have them."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    path.write_text(f"{text}\n", encoding="utf-8")


def write_text_tokenizer(
    out: Path, special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> dict[str, int]:
    """Train on a few sentences, and write all files that official code reads.

    Returns: The id of each token; always the same.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_ROLES] * 50 + [_PROSE] * 4, trainer)
    tokenizer.add_special_tokens([_special(token) for token in special_tokens])
    tokenizer.save(str(out / "tokenizer.json"))
    model = json.loads(tokenizer.to_str())["model"]
    save_json(out / "vocab.json", model["vocab"])
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    (out / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    special = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {
            str(token_id): {"content": token, **flags, "special": True}
            for token_id, token in special.items()
        },
        "additional_special_tokens": list(special.values())[1:],
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": 131_072,
        "split_special_tokens": False,
    }
    save_json(out / "tokenizer_config.json", config)
    return tokenizer.get_vocab()
