"""Write a tiny Qwen3-TTS Base checkpoint with random weights. Not a model."""

from collections.abc import Callable
from pathlib import Path

import torch

from vllm_tts_cache.families.qwen3_tts.tiny import configs, sizes
from vllm_tts_cache.families.qwen3_tts.tiny.encoder_weights import (
    add_codec_decoder,
    add_codec_encoder,
    add_speaker_encoder,
)
from vllm_tts_cache.families.qwen3_tts.tiny.sizes import (
    PLAIN,
    SENSITIVE,
    CheckpointOptions,
)
from vllm_tts_cache.families.qwen3_tts.tiny.talker_weights import add_talker
from vllm_tts_cache.testing.tiny_parts import (
    WeightBuilder,
    save_json,
    save_text_tokenizer,
    save_weights,
    train_text_tokenizer,
)


def write(
    directory: Path, options: CheckpointOptions, report: Callable[[str], None]
) -> None:
    """Fill an empty directory; called through `TINY`."""
    gains = SENSITIVE if options.sensitive else PLAIN
    report("text tokenizer")
    text = train_text_tokenizer(configs.ALL_SPECIAL_TOKENS)
    save_text_tokenizer(directory, text)
    report("talker and speaker encoder")
    weights = WeightBuilder(options.seed)
    add_talker(
        weights,
        gains,
        text_vocab_size=text.vocab_size,
        pad_id=text.id_of(configs.TTS_PAD),
        eos_logit=options.eos_logit,
    )
    add_speaker_encoder(weights, sizes.SPEAKER_ENCODER[options.encoders], gains)
    save_weights(directory / "model.safetensors", weights.tensors, torch.bfloat16)
    save_json(directory / "config.json", configs.model_config(text, options.encoders))
    save_json(directory / "generation_config.json", configs.GENERATION)
    save_json(directory / "preprocessor_config.json", configs.TEXT_PREPROCESSOR)
    report("speech tokenizer")
    codec = directory / "speech_tokenizer"
    codec.mkdir()
    weights = WeightBuilder(options.seed)
    add_codec_encoder(weights, sizes.CODEC_ENCODER[options.encoders], gains)
    add_codec_decoder(weights, options.decoder)
    save_weights(codec / "model.safetensors", weights.tensors, torch.float32)
    config = configs.speech_tokenizer_config(options.encoders, options.decoder)
    save_json(codec / "config.json", config)
    save_json(codec / "preprocessor_config.json", configs.AUDIO_PREPROCESSOR)
