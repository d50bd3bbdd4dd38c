"""Write a tiny Fish Speech S2 Pro checkpoint with random weights. Not a model."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_tts_cache.testing.directories import MARKER, new_directory
from vllm_tts_cache.testing.fish_speech import configs, sizes
from vllm_tts_cache.testing.fish_speech.codec_weights import add_codec
from vllm_tts_cache.testing.fish_speech.language_model_weights import (
    add_fast_ar,
    add_slow_ar,
)
from vllm_tts_cache.testing.fish_speech.options import CheckpointOptions
from vllm_tts_cache.testing.fish_speech.text_tokenizer import save_text_tokenizer
from vllm_tts_cache.testing.weights import WeightBuilder, save_weights

_README = """\
Random weights, not a model.

This directory has the layout of a released Fish Speech S2 Pro checkpoint, so that
its reference encoder can be tested without a download. It was written by
`vllm-tts-cache make-checkpoint`; nothing in it was taken from a released checkpoint.
The options are in {marker}. A codec.json, where there is one, holds the sizes of a
codec smaller than the released one.
"""


def write_fish_speech_checkpoint(
    out: Path,
    options: CheckpointOptions | None = None,
    *,
    force: bool = False,
    report: Callable[[str], None] = lambda _step: None,
) -> Path:
    """Write the checkpoint to ``out`` and return ``out``.

    Args:
        out: A directory that is absent or empty.
        options: Equal options give byte-identical files.
        force: Replace a checkpoint that this function wrote.
        report: Called with the name of each step as it begins.

    Raises:
        ConfigError: ``out`` must not be overwritten.
        StorageError: The disk failed. Nothing half-written stays behind.
    """
    options = options or CheckpointOptions()
    with new_directory(out, force=force) as directory:
        report("text tokenizer")
        save_text_tokenizer(directory)
        report("language models")
        _write_language_models(directory, options)
        report("codec")
        _write_codec(directory, options)
        _write_json(
            directory / MARKER, {"family": "fish-speech", **dataclasses.asdict(options)}
        )
        (directory / "README.txt").write_text(_README.format(marker=MARKER))
    return out


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
