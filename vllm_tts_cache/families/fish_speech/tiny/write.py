"""Write a tiny Fish Speech S2 Pro checkpoint with random weights. Not a model."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_tts_cache.families.fish_speech.tiny import configs, sizes
from vllm_tts_cache.families.fish_speech.tiny.codec_weights import add_codec
from vllm_tts_cache.families.fish_speech.tiny.language_model_weights import (
    add_fast_ar,
    add_slow_ar,
)
from vllm_tts_cache.families.fish_speech.tiny.sizes import CheckpointOptions
from vllm_tts_cache.families.fish_speech.tiny.text_tokenizer import save_text_tokenizer
from vllm_tts_cache.testing.weights import WeightBuilder, save_weights


def write(
    directory: Path, options: CheckpointOptions, report: Callable[[str], None]
) -> None:
    """Fill an empty directory; called through `TINY`.

    A ``codec.json``, where there is one, holds the sizes of a codec smaller than the
    released one.
    """
    report("text tokenizer")
    save_text_tokenizer(directory)
    report("language models")
    _write_language_models(directory, options)
    report("codec")
    _write_codec(directory, options)


def _write_language_models(directory: Path, options: CheckpointOptions) -> None:
    weights = WeightBuilder(options.seed)
    add_slow_ar(weights)
    add_fast_ar(weights)
    save_weights(directory / "model.safetensors", weights.tensors, torch.bfloat16)
    _write_json(directory / "config.json", configs.model_config())
    _write_json(directory / "generation_config.json", configs.generation_config())


def _write_codec(directory: Path, options: CheckpointOptions) -> None:
    size = sizes.CODEC[options.encoders]
    weights = WeightBuilder(options.seed)
    add_codec(weights, size)
    # Through a file of ours: a full disk is an OSError there, not a RuntimeError.
    with (directory / "codec.pth").open("wb") as file:
        # Of the forms that are about, one that the host reads as well.
        torch.save({"generator": weights.tensors}, file)
    if options.encoders != "real":
        _write_json(directory / "codec.json", configs.codec_config(size))


def _write_json(path: Path, value: configs.Json) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
