"""A tokenizer's folder with random weights, for tiny checkpoints. Not a model.

Of one size and one seed it is the same in each family's checkpoint, byte for byte.
"""

import json
from pathlib import Path
from typing import Any

import torch

from vllm_tts_cache.families.networks.higgs_tokenizer.frames import (
    CODEBOOK_SIZE,
    NUM_CODEBOOKS,
)
from vllm_tts_cache.families.networks.higgs_tokenizer.sizes import CONFIG
from vllm_tts_cache.families.networks.higgs_tokenizer.tiny_decoder import (
    add_acoustic_decoder,
    add_semantic_decoder,
)
from vllm_tts_cache.families.networks.higgs_tokenizer.tiny_encoder import (
    add_acoustic_encoder,
    add_hubert,
    add_semantic_encoder,
)
from vllm_tts_cache.testing.tiny_checkpoint import EncoderSize
from vllm_tts_cache.testing.tiny_parts import WeightBuilder, save_weights

Json = dict[str, Any]

# As released, so that encodings have their size and codes their values.
_CODEBOOK_DIM = 64
_RATES = (8, 5, 4, 2, 3)
_LATENT_DIM = 256
_KERNELS = (10, 3, 3, 3, 3, 2, 2)
_STRIDES = (5, 2, 2, 2, 2, 2, 2)

# Width of the acoustic encoder's first convolution; every stage doubles it.
_ENCODER_DIM: dict[EncoderSize, int] = {"tiny": 8, "real": 64}
# Every stage of the decoder halves it.
DECODER_DIM = 64
_HUBERT: dict[EncoderSize, Json] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "conv_dim": [32] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    },
    "real": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "conv_dim": [512] * 7,
        "num_conv_pos_embeddings": 128,
        "num_conv_pos_embedding_groups": 16,
    },
}

# A code takes away about as much as is left, so every codebook has work to do.
_CODE_GAIN = 0.5


def write_tokenizer(
    directory: Path,
    *,
    encoders: EncoderSize,
    seed: int,
    decoder_dim: int = DECODER_DIM,
) -> None:
    """Fill an absent directory, ``audio_tokenizer`` of a checkpoint."""
    directory.mkdir()
    config = tokenizer_config(encoders, decoder_dim)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    weights = WeightBuilder(seed)
    add_tokenizer(weights, config)
    save_weights(directory / "model.safetensors", weights.tensors, torch.float32)


def tokenizer_config(encoders: EncoderSize, decoder_dim: int) -> Json:
    """``config.json`` as transformers and the official packages read it."""
    hubert = {
        "model_type": "hubert",
        **_HUBERT[encoders],
        "conv_kernel": list(_KERNELS),
        "conv_stride": list(_STRIDES),
        "conv_bias": False,
        "feat_extract_norm": "group",
        "do_stable_layer_norm": False,
        "layer_norm_eps": 1e-5,
        "mask_time_prob": 0.0,
    }
    dac = {
        "model_type": "dac",
        "encoder_hidden_size": _ENCODER_DIM[encoders],
        "decoder_hidden_size": decoder_dim,
        "downsampling_ratios": list(_RATES),
        "upsampling_ratios": list(_RATES),
        "hidden_size": _LATENT_DIM,
    }
    return {
        "architectures": ["HiggsAudioV2TokenizerModel"],
        "model_type": "higgs_audio_v2_tokenizer",
        "target_bandwidths": [0.5, 1, 1.5, 2],
        "sample_rate": 24_000,
        "semantic_sample_rate": 16_000,
        "downsample_factor": 320,
        "kernel_size": 3,
        "unit_kernel_size": 3,
        "channel_ratios": [1, 1],
        "strides": [1, 1],
        "block_dilations": [1, 1],
        "codebook_size": CODEBOOK_SIZE,
        "codebook_dim": _CODEBOOK_DIM,
        "acoustic_model_config": dac,
        "semantic_model_config": hubert,
    }


def add_tokenizer(weights: WeightBuilder, config: Json) -> None:
    """Add the whole of it, both ways."""
    dac, hubert = config["acoustic_model_config"], config["semantic_model_config"]
    semantic_dim = hubert["hidden_size"]
    hidden = _LATENT_DIM + semantic_dim
    add_acoustic_encoder(weights.under("acoustic_encoder"), dac)
    add_hubert(weights.under("semantic_model"), hubert)
    add_semantic_encoder(weights.under("encoder_semantic"), semantic_dim)
    _add_linear(weights, "fc", hidden, hidden)
    for number in range(NUM_CODEBOOKS):
        _add_codebook(weights.under(f"quantizer.quantizers.{number}"), hidden)
    _add_linear(weights, "fc1", hidden, semantic_dim)
    _add_linear(weights, "fc2", hidden, _LATENT_DIM)
    add_semantic_decoder(weights.under("decoder_semantic"), semantic_dim)
    add_acoustic_decoder(weights.under("acoustic_decoder"), dac)


def _add_codebook(book: WeightBuilder, hidden: int) -> None:
    _add_linear(book, "project_in", hidden, _CODEBOOK_DIM)
    _add_linear(book, "project_out", _CODEBOOK_DIM, hidden, _CODE_GAIN)
    entries = book.under("codebook")
    shape = (CODEBOOK_SIZE, _CODEBOOK_DIM)
    entries.normal("embed", shape, 1.0)
    # What its training needed.
    entries.fill("embed_avg", shape, 0.0)
    entries.fill("cluster_size", shape[:1], 0.0)
    entries.fill("inited", (1,), 1.0)


def _add_linear(
    weights: WeightBuilder, name: str, inputs: int, outputs: int, gain: float = 1.0
) -> None:
    weights.projection(f"{name}.weight", (outputs, inputs), gain)
    weights.fill(f"{name}.bias", (outputs,), 0.0)
