"""Write a tiny Qwen3-TTS Base checkpoint with random weights. Not a model."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_tts_cache.testing.directories import MARKER, new_directory
from vllm_tts_cache.testing.qwen3_tts import configs, sizes, text_tokenizer
from vllm_tts_cache.testing.qwen3_tts.codec_decoder_weights import add_codec_decoder
from vllm_tts_cache.testing.qwen3_tts.codec_encoder_weights import add_codec_encoder
from vllm_tts_cache.testing.qwen3_tts.gains import PLAIN, SENSITIVE, Gains
from vllm_tts_cache.testing.qwen3_tts.options import CheckpointOptions
from vllm_tts_cache.testing.qwen3_tts.speaker_encoder_weights import add_speaker_encoder
from vllm_tts_cache.testing.qwen3_tts.talker_weights import add_talker
from vllm_tts_cache.testing.qwen3_tts.text_tokenizer import TextTokenizer
from vllm_tts_cache.testing.weights import WeightBuilder, save_weights

_README = """\
Random weights, not a model.

This directory has the layout of a released Qwen3-TTS Base checkpoint, so that a
server can be started and tested without a download. What it speaks is noise. It was
written by `vllm-tts-cache make-checkpoint`; nothing in it was taken from a released
checkpoint. The options are in {marker}.
"""


def write_qwen3_tts_checkpoint(
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
    gains = SENSITIVE if options.sensitive else PLAIN
    with new_directory(out, force=force) as directory:
        report("text tokenizer")
        text = text_tokenizer.train_text_tokenizer()
        text_tokenizer.save_text_tokenizer(directory, text)
        report("talker and speaker encoder")
        _write_talker(directory, text, options, gains)
        report("speech tokenizer")
        _write_speech_tokenizer(directory / "speech_tokenizer", options, gains)
        _write_json(
            directory / MARKER, {"family": "qwen3-tts", **dataclasses.asdict(options)}
        )
        (directory / "README.txt").write_text(_README.format(marker=MARKER))
    return out


def _write_talker(
    directory: Path, text: TextTokenizer, options: CheckpointOptions, gains: Gains
) -> None:
    weights = WeightBuilder(options.seed)
    add_talker(
        weights,
        gains,
        text_vocab_size=text.vocab_size,
        pad_id=text.id_of(text_tokenizer.TTS_PAD),
        eos_logit=options.eos_logit,
    )
    add_speaker_encoder(weights, sizes.SPEAKER_ENCODER[options.encoders], gains)
    save_weights(directory / "model.safetensors", weights.tensors, torch.bfloat16)
    _write_json(directory / "config.json", configs.model_config(text, options.encoders))
    _write_json(directory / "generation_config.json", configs.generation_config())
    _write_json(
        directory / "preprocessor_config.json", configs.text_preprocessor_config()
    )


def _write_speech_tokenizer(
    directory: Path, options: CheckpointOptions, gains: Gains
) -> None:
    directory.mkdir()
    weights = WeightBuilder(options.seed)
    add_codec_encoder(weights, sizes.CODEC_ENCODER[options.encoders], gains)
    add_codec_decoder(weights, sizes.CODEC_DECODER)
    save_weights(directory / "model.safetensors", weights.tensors, torch.float32)
    _write_json(
        directory / "config.json", configs.speech_tokenizer_config(options.encoders)
    )
    _write_json(
        directory / "preprocessor_config.json", configs.audio_preprocessor_config()
    )


def _write_json(path: Path, value: configs.Json) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
