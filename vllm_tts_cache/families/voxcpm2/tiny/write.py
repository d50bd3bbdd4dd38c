"""Write a tiny VoxCPM2 checkpoint with random weights. Not a model."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_tts_cache.families.voxcpm2.tiny import configs, sizes
from vllm_tts_cache.families.voxcpm2.tiny.audio_vae_weights import add_audio_vae
from vllm_tts_cache.families.voxcpm2.tiny.model_weights import add_model
from vllm_tts_cache.families.voxcpm2.tiny.sizes import CheckpointOptions
from vllm_tts_cache.families.voxcpm2.tiny.text_tokenizer import (
    save_text_tokenizer,
    text_vocab,
)
from vllm_tts_cache.testing.weights import WeightBuilder, save_weights


def write(
    directory: Path, options: CheckpointOptions, report: Callable[[str], None]
) -> None:
    """Fill an empty directory.

    Args:
        directory: Where to write.
        options: Equal options give byte-identical files.
        report: Called with the name of each step as it begins.
    """
    report("text tokenizer")
    save_text_tokenizer(directory)
    report("language models")
    _write_model(directory, options)
    report("audio VAE")
    _write_audio_vae(directory / "audiovae.pth", options)


def _write_model(directory: Path, options: CheckpointOptions) -> None:
    vocab_size = len(text_vocab())
    config = configs.model_config(vocab_size, options.encoders)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = WeightBuilder(options.seed)
    add_model(weights, vocab_size)
    save_weights(directory / "model.safetensors", weights.tensors, torch.bfloat16)


def _write_audio_vae(path: Path, options: CheckpointOptions) -> None:
    weights = WeightBuilder(options.seed)
    add_audio_vae(weights, sizes.ENCODER_DIM[options.encoders])
    # Through a file of ours: a full disk is an OSError there, not a RuntimeError.
    with path.open("wb") as file:
        torch.save({"state_dict": weights.tensors}, file)
