"""Reads the sizes of the encode side from a tokenizer's ``config.json``."""

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
# the host and for the official packages. Fields that only training, or another network
# of the same name, uses are not read.


@dataclass(frozen=True, slots=True, kw_only=True)
class AcousticSizes:
    """Sizes of the DAC's encoder."""

    model_type: Literal["dac"] = "dac"
    encoder_hidden_size: Positive = 64
    downsampling_ratios: tuple[Positive, ...] = (8, 5, 4, 2)
    hidden_size: Positive = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticSizes:
    """Sizes of the HuBERT."""

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
    """Sizes of the whole encode side, by transformers' names.

    ``downsample_factor``: samples at ``semantic_sample_rate`` for a HuBERT feature.
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
    codebook_dim: Positive = 64
    acoustic_model_config: AcousticSizes = field(default_factory=AcousticSizes)
    semantic_model_config: SemanticSizes = field(default_factory=SemanticSizes)

    @property
    def samples_per_frame(self) -> int:
        """Samples that the acoustic encoder makes one frame of."""
        return math.prod(self.acoustic_model_config.downsampling_ratios)

    @property
    def features_per_frame(self) -> int:
        """HuBERT features in the time of a frame; the first of them is kept."""
        seconds = self.samples_per_frame / self.sample_rate
        return int(seconds * self.semantic_sample_rate / self.downsample_factor)

    @property
    def semantic_hidden_size(self) -> int:
        """Width of HuBERT's features."""
        return self.semantic_model_config.hidden_size

    @property
    def hidden_size(self) -> int:
        """Width of both encoders' outputs together."""
        both = self.acoustic_model_config, self.semantic_model_config
        return sum(config.hidden_size for config in both)

    @property
    def num_codebooks(self) -> int:
        """Codebooks that the highest bandwidth needs, at most those in the file."""
        rate = math.ceil(self.sample_rate / self.samples_per_frame)
        bits = math.log2(self.codebook_size)
        bits_per_second = 1000 * self.target_bandwidths[-1]
        in_file = int(bits_per_second // (rate * math.ceil(bits)))
        return min(in_file, max(1, math.floor(bits_per_second / (rate * bits))))


# The sizes of every released checkpoint, for one with weights but no tokenizer config.
RELEASED = TokenizerSizes(
    model_type="higgs_audio_v2_tokenizer",
    target_bandwidths=(0.5, 1, 1.5, 2),
    acoustic_model_config=AcousticSizes(downsampling_ratios=(8, 5, 4, 2, 3)),
)


def sizes_of(config: Mapping[str, Any], *, path: str) -> TokenizerSizes:
    """Read the sizes from a tokenizer's config, as transformers reads it.

    Raises:
        CheckpointError: The config is of another tokenizer, its HuBERT is not built as
            the released one, or its sizes do not fit together; it names ``path``.
    """
    # As in transformers, a field that is left out, or null, has its default.
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
        return "its HuBERT has do_stable_layer_norm or conv_pos_batch_norm; it may not"
    convs = semantic.conv_dim, semantic.conv_stride, semantic.conv_kernel
    if len(set(map(len, convs))) > 1:
        return "conv_dim, conv_stride and conv_kernel differ in length"
    if len(sizes.strides) != len(sizes.channel_ratios):
        return "strides and channel_ratios differ in length"
    if sizes.codebook_size > np.iinfo(np.int16).max + 1:
        return "its codes do not fit into 16 bits"
    if sizes.num_codebooks < 1 or sizes.features_per_frame < 1:
        return "its bandwidth or its rates leave no codes"
    return None
