"""Write a tiny Qwen3-TTS Base checkpoint with random weights. Not a model."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from vllm_tts_cache.families.qwen3_tts.tiny import configs, encoder_weights, sizes
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_checkpoint import Report
from vllm_tts_cache.testing.tiny_parts import WeightBuilder


def write(directory: Path, options: sizes.CheckpointOptions, report: Report) -> None:
    """Fill an empty directory; called as the family's ``tiny_part``."""
    report("text tokenizer")
    tokenizer = parts.train_text_tokenizer(configs.ALL_SPECIAL_TOKENS)
    parts.save_text_tokenizer(directory, tokenizer)
    ids = tokenizer.get_vocab()
    report("talker and speaker encoder")
    weights = WeightBuilder(options.seed)
    add_talker(weights, len(ids), ids[configs.TTS_PAD], options.eos_logit)
    config = configs.model_config(ids, options.encoders)
    encoder_weights.add_speaker_encoder(weights, config["speaker_encoder_config"])
    parts.save_weights(directory / "model.safetensors", weights.tensors, torch.bfloat16)
    parts.save_json(directory / "config.json", config)
    parts.save_json(directory / "generation_config.json", configs.GENERATION)
    parts.save_json(directory / "preprocessor_config.json", configs.TEXT_PREPROCESSOR)
    report("speech tokenizer")
    codec = directory / "speech_tokenizer"
    codec.mkdir()
    weights = WeightBuilder(options.seed)
    config = configs.speech_tokenizer_config(options.encoders, options.decoder)
    encoder_weights.add_codec_encoder(weights, config["encoder_config"])
    encoder_weights.add_codec_decoder(weights, config["decoder_config"])
    parts.save_weights(codec / "model.safetensors", weights.tensors, torch.float32)
    parts.save_json(codec / "config.json", config)
    parts.save_json(codec / "preprocessor_config.json", configs.AUDIO_PREPROCESSOR)


_TEXT_OVER = 0
# One frame is the sum of 16 code embeddings and a text embedding; at these sizes
# the codes and the text weigh about the same.
_CODE_STD = 0.125
_TEXT_STD = 0.5
# Weight of the query and key norms. Diffuse attention dilutes the one position that
# holds the speaker among hundreds.
_ATTENTION_SHARPNESS = 2.0
_LAYER_GAIN = 1.5  # of every projection in the talker's layers
# Mean, measured, of channel 0 behind the talker's last norm once the text is over.
_NORMED_TEXT_OVER = 0.265


def add_talker(
    weights: WeightBuilder, text_vocab_size: int, pad_id: int, eos_logit: float
) -> None:
    """Add everything below ``talker.``, the code predictor's weights among it.

    A random talker says nothing about when to stop, and the host answers a speech that
    never ends with an error. So one channel of the residual stream is not random:
    channel 0 is 1 where the talker is fed the padding that follows a text, and 0
    elsewhere; no layer writes to it, and the logit of the end of speech is read from it
    alone. An utterance therefore lasts as long as its text, and then ends by chance.

    Args:
        weights: Where to add it.
        text_vocab_size: Rows of the text embedding.
        pad_id: The text token that stands where there is no text.
        eos_logit: Mean logit of the end of speech once the text is over.
    """
    talker = weights.under("talker")
    model = talker.under("model")
    _add_layers(model, sizes.TALKER, keep_free=_TEXT_OVER)
    shape = sizes.TALKER_VOCAB_SIZE, sizes.TALKER.hidden
    codes = model.normal("codec_embedding.weight", shape, _CODE_STD)
    codes[:, _TEXT_OVER] = 0
    _add_text(talker, text_vocab_size, pad_id)
    _add_codec_head(talker, eos_logit / _NORMED_TEXT_OVER)
    _add_code_predictor(talker.under("code_predictor"))


def _add_text(talker: WeightBuilder, vocab_size: int, pad_id: int) -> None:
    """Add the text embedding and its projection; channel 0 is for padding only."""
    width, hidden = sizes.TEXT_HIDDEN, sizes.TALKER.hidden
    embedding = talker.normal("model.text_embedding.weight", (vocab_size, width), 1.0)
    embedding[:, _TEXT_OVER] = 0
    embedding[pad_id, _TEXT_OVER] = 1
    projection = talker.under("text_projection")
    first = projection.projection("linear_fc1.weight", (width, width))
    projection.fill("linear_fc1.bias", (width,), 0.0)
    second = projection.projection("linear_fc2.weight", (hidden, width), 2 * _TEXT_STD)
    projection.fill("linear_fc2.bias", (hidden,), 0.0)
    for weight in (first, second):
        _separate(weight)
    second[_TEXT_OVER, _TEXT_OVER] /= silu(torch.tensor(1.0))


def _separate(weight: Tensor) -> None:
    weight[_TEXT_OVER] = 0
    weight[:, _TEXT_OVER] = 0
    weight[_TEXT_OVER, _TEXT_OVER] = 1


def _add_codec_head(talker: WeightBuilder, eos_weight: float) -> None:
    shape = sizes.TALKER_VOCAB_SIZE, sizes.TALKER.hidden
    head = talker.projection("codec_head.weight", shape)
    head[:, _TEXT_OVER] = 0
    head[configs.CODEC_EOS_ID] = 0
    head[configs.CODEC_EOS_ID, _TEXT_OVER] = eos_weight


def _add_code_predictor(predictor: WeightBuilder) -> None:
    shape = sizes.CODEBOOK_SIZE, sizes.CODE_PREDICTOR.hidden
    _add_layers(predictor.under("model"), sizes.CODE_PREDICTOR)
    for book in range(sizes.NUM_CODEBOOKS - 1):
        name = f"model.codec_embedding.{book}.weight"
        predictor.normal(name, shape, _CODE_STD)[:, _TEXT_OVER] = 0
        predictor.projection(f"lm_head.{book}.weight", shape, 2.0)


def _add_layers(
    model: WeightBuilder, size: sizes.TransformerSizes, keep_free: int | None = None
) -> None:
    """Add Qwen3 layers and the last norm; none writes to channel ``keep_free``."""

    def project(layer: WeightBuilder, name: str, shape: Sequence[int]) -> None:
        weight = layer.projection(name, shape, _LAYER_GAIN)
        if keep_free is not None and re.search("(o|down)_proj", name):
            weight[keep_free] = 0

    parts.add_layers(model, size, project, qk_norm=_ATTENTION_SHARPNESS)
