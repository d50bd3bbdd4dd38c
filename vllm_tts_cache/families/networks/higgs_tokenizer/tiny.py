"""A tokenizer's folder with random weights, for tiny checkpoints. Not a model.

With equal sizes and seed it is equal in each family's checkpoint, byte for byte.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from vllm_tts_cache.families.networks.higgs_tokenizer.sizes import (
    CONFIG,
    RELEASED,
    SemanticSizes,
)
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_checkpoint import EncoderSize
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

Json = dict[str, Any]

# Width of the acoustic encoder's first convolution; every stage doubles it.
_ENCODER_DIM: dict[EncoderSize, int] = {"tiny": 8, "real": 64}
# Every stage of the decoder halves it.
DECODER_DIM = 64
_HUBERT: dict[EncoderSize, SemanticSizes] = {
    "tiny": SemanticSizes(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        conv_dim=(32,) * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    ),
    "real": SemanticSizes(),
}


def write_tokenizer(directory: Path, *, encoders: EncoderSize, seed: int) -> None:
    """Create and fill a directory, ``audio_tokenizer`` of a checkpoint."""
    directory.mkdir()
    config = tokenizer_config(encoders, DECODER_DIM)
    parts.save_json(directory / CONFIG, config)
    weights = WeightBuilder(seed)
    add_tokenizer(weights, config)
    parts.save_weights(directory / "model.safetensors", weights.tensors, torch.float32)


def tokenizer_config(encoders: EncoderSize, decoder_dim: int) -> Json:
    """Return ``config.json`` as transformers and the official packages read it.

    All but the widths is as released, and so are the sizes of encodings and codes.
    """
    config = asdict(replace(RELEASED, semantic_model_config=_HUBERT[encoders]))
    dac = config["acoustic_model_config"]
    dac["encoder_hidden_size"] = _ENCODER_DIM[encoders]
    dac["decoder_hidden_size"] = decoder_dim
    dac["upsampling_ratios"] = dac["downsampling_ratios"]
    config["semantic_model_config"]["mask_time_prob"] = 0.0
    config["channel_ratios"] = [1, 1]  # transformers takes integers only
    return {"architectures": ["HiggsAudioV2TokenizerModel"], **config}


def add_tokenizer(weights: WeightBuilder, config: Json) -> None:
    """Add encoder and decoder, by the names and shapes that transformers has."""
    from transformers import HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel

    tokenizer = HiggsAudioV2TokenizerConfig(**config)
    shapes = parts.shapes_of(HiggsAudioV2TokenizerModel, tokenizer)
    hidden = config["semantic_model_config"]["hidden_size"]
    shapes["semantic_model.masked_spec_embed"] = (hidden,)  # released files have it

    def add_norm_of_positions(to: WeightBuilder, name: str, shape: Any) -> None:
        # The norm is over all outputs together; each is to have a variance of 1.
        to.fill(name, shape, (hidden / shape[2]) ** 0.5)

    parts.add_all(weights, shapes, {"original0$": add_norm_of_positions, **_RULES})


def _add_upsampling(weights: WeightBuilder, name: str, shape: Sequence[int]) -> None:
    """Add a transposed convolution ``(in, out, kernel)`` of two strides' width."""
    # Two taps of each input meet in an output.
    weight = weights.normal(name, shape, 1 / math.sqrt(2 * shape[0]))
    weight -= weight.mean(dim=0, keepdim=True)


# After an activation that only adds, random layers would pass on mostly the constant
# that all their inputs share; so the layers there are `centred`.
_RULES: dict[str, parts.Draw] = {
    r"(bias|embed_avg|cluster_size|masked_spec_embed)$": parts.constant(0.0),
    r"(alpha|inited|layer_norm\.weight)$": parts.constant(1.0),
    r"(codebook\.embed|original1)$": parts.normal(),
    # A code removes about as much as it leaves, so every codebook has work to do.
    r"project_out\.weight$": parts.projected(0.5),
    # Speech has a standard deviation of about 0.1; the layers behind work at about 1.
    r"^acoustic_encoder\.conv1\.": parts.projected(10.0),
    # The output is used as samples without scaling.
    r"^acoustic_decoder\.conv2\.": parts.centred(0.1),
    r"conv_t1\.": _add_upsampling,
    r"^acoustic.*res_unit\d\.conv2\.": parts.centred(0.5),
    # A stage loses about as much as its residual units add.
    r"^acoustic_encoder\.block\.\d+\.conv1\.": parts.centred(0.7),
    r"^acoustic": parts.centred(),
    r"conv_layers\.0\.conv\.": parts.projected(2**0.5),
    r"conv_layers\.": parts.centred(2**0.5),
    r"(q|k)_proj\.": parts.projected(2.0),
    r"res_units\.\d\.conv2\.": parts.projected(0.5),
    r"": parts.projected(),
}
