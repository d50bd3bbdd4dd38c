"""What a tokenizer's ``config.json`` says of its encode side."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from vllm_tts_cache.errors import CheckpointError

Positive = Annotated[int, msgspec.Meta(gt=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]

CONFIG = "config.json"


# The defaults of each section are those of transformers 5, which reads the file for
# the host and for the official packages. Fields of its that only training, or another
# network of the same name, has are not read.


@dataclass(frozen=True, slots=True, kw_only=True)
class AcousticSizes:
    """The DAC's encoder."""

    model_type: Literal["dac"] = "dac"
    encoder_hidden_size: Positive = 64
    downsampling_ratios: tuple[Positive, ...] = (8, 5, 4, 2)
    hidden_size: Positive = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticSizes:
    """The HuBERT."""

    model_type: Literal["hubert"] = "hubert"
    hidden_size: Positive = 768
    num_hidden_layers: Positive = 12
    num_attention_heads: Positive = 12
    intermediate_size: Positive = 3072
    layer_norm_eps: PositiveFloat = 1e-5
    hidden_act: Literal["gelu"] = "gelu"
    feat_extract_activation: Literal["gelu"] = "gelu"
    feat_extract_norm: Literal["group"] = "group"
    feat_proj_layer_norm: bool = True
    do_stable_layer_norm: bool = False
    conv_dim: tuple[Positive, ...] = (512,) * 7
    conv_stride: tuple[Positive, ...] = (5, 2, 2, 2, 2, 2, 2)
    conv_kernel: tuple[Positive, ...] = (10, 3, 3, 3, 3, 2, 2)
    conv_bias: bool = False
    num_conv_pos_embeddings: Positive = 128
    num_conv_pos_embedding_groups: Positive = 16
    conv_pos_batch_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSizes:
    """The encode side of the whole.

    Attributes:
        downsample_factor: Samples of the semantic model for a feature of its.
    """

    model_type: Literal["higgs_audio_v2_tokenizer"]
    target_bandwidths: tuple[PositiveFloat, ...] = (0.5, 1, 1.5, 2, 4)
    sample_rate: Positive = 24_000
    semantic_sample_rate: Positive = 16_000
    downsample_factor: Positive = 320
    kernel_size: Positive = 3
    channel_ratios: tuple[PositiveFloat, ...] = (1.0, 1.0)
    strides: tuple[Positive, ...] = (1, 1)
    block_dilations: tuple[Positive, ...] = (1, 1)
    unit_kernel_size: Positive = 3
    codebook_size: Positive = 1024
    codebook_dim: Positive | None = 64
    acoustic_model_config: AcousticSizes = field(default_factory=AcousticSizes)
    semantic_model_config: SemanticSizes = field(default_factory=SemanticSizes)

    @property
    def samples_per_frame(self) -> int:
        """Samples that the acoustic encoder makes one frame of."""
        return math.prod(self.acoustic_model_config.downsampling_ratios)

    @property
    def features_per_frame(self) -> int:
        """Of how many features of the semantic model one is kept."""
        seconds = self.samples_per_frame / self.sample_rate
        return int(seconds * self.semantic_sample_rate / self.downsample_factor)

    @property
    def hidden_size(self) -> int:
        """What both encoders give together."""
        return (
            self.acoustic_model_config.hidden_size
            + self.semantic_model_config.hidden_size
        )

    @property
    def num_codebooks(self) -> int:
        """As many as the highest bandwidth takes, and the file has."""
        rate = math.ceil(self.sample_rate / self.samples_per_frame)
        bits = math.log2(self.codebook_size)
        bits_per_second = 1000 * self.target_bandwidths[-1]
        in_file = int(bits_per_second // (rate * math.ceil(bits)))
        return min(in_file, max(1, math.floor(bits_per_second / (rate * bits))))


# What every released checkpoint has, for those that bring weights and no config.
RELEASED = TokenizerSizes(
    model_type="higgs_audio_v2_tokenizer",
    target_bandwidths=(0.5, 1, 1.5, 2),
    acoustic_model_config=AcousticSizes(downsampling_ratios=(8, 5, 4, 2, 3)),
)


def sizes_of(config: Mapping[str, Any], *, path: str) -> TokenizerSizes:
    """Take them out of a tokenizer's config.

    Args:
        config: As transformers reads it.
        path: Where it is from, for messages.

    Raises:
        CheckpointError: It is not this tokenizer, or one with a HuBERT of another
            build than the released one.
    """
    # As transformers takes it: left out, or null, is the default.
    given = {name: value for name, value in config.items() if value is not None}
    try:
        sizes = msgspec.convert(given, TokenizerSizes)
    except msgspec.ValidationError as exc:
        raise CheckpointError(path, str(exc)) from exc
    if problem := _problem(sizes):
        raise CheckpointError(path, problem)
    return sizes


def _problem(sizes: TokenizerSizes) -> str | None:
    semantic = sizes.semantic_model_config
    if semantic.do_stable_layer_norm or semantic.conv_pos_batch_norm:
        return "its HuBERT is built otherwise than the one that voices are cloned with"
    if (
        not len(semantic.conv_dim)
        == len(semantic.conv_stride)
        == len(semantic.conv_kernel)
    ):
        return "conv_dim, conv_stride and conv_kernel differ in length"
    if len(sizes.strides) != len(sizes.channel_ratios):
        return "strides and channel_ratios differ in length"
    if sizes.codebook_size > np.iinfo(np.int16).max + 1:
        return "its codes do not fit into 16 bits"
    if sizes.num_codebooks < 1 or sizes.features_per_frame < 1:
        return "its bandwidth or its rates leave no codes"
    return None
