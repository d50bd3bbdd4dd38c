"""Write a tiny Qwen3-TTS Base checkpoint with random weights. Not a model."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from vllm_tts_cache.families.qwen3_tts.tiny import configs
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_checkpoint import Report, TransformerSizes
from vllm_tts_cache.testing.tiny_parts import WeightBuilder


def write(directory: Path, options: configs.CheckpointOptions, report: Report) -> None:
    """Fill an empty directory; called as the family's ``tiny_part``."""
    report("text tokenizer")
    tokenizer = parts.train_text_tokenizer(configs.ALL_SPECIAL_TOKENS)
    parts.save_text_tokenizer(directory, tokenizer)
    ids = tokenizer.get_vocab()
    report("talker and speaker encoder")
    weights = WeightBuilder(options.seed)
    add_talker(weights, len(ids), ids[configs.TTS_PAD], options.eos_logit)
    config = configs.model_config(ids, options.encoders)
    add_speaker_encoder(weights, config["speaker_encoder_config"])
    parts.save_weights(directory / "model.safetensors", weights.tensors, torch.bfloat16)
    parts.save_json(directory / "config.json", config)
    parts.save_json(directory / "generation_config.json", configs.GENERATION)
    parts.save_json(directory / "preprocessor_config.json", configs.TEXT_PREPROCESSOR)
    report("speech tokenizer")
    codec = directory / "speech_tokenizer"
    codec.mkdir()
    weights = WeightBuilder(options.seed)
    decoder = "real" if options.real_decoder else "tiny"
    config = configs.speech_tokenizer_config(options.encoders, decoder)
    add_codec_encoder(weights, config["encoder_config"])
    add_codec_decoder(weights, config["decoder_config"])
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
    ``eos_logit`` is the mean logit of the end of speech from then on.
    """
    talker = weights.under("talker")
    model = talker.under("model")
    _add_layers(model, configs.TALKER, keep_free=_TEXT_OVER)
    shape = configs.TALKER_VOCAB_SIZE, configs.TALKER.hidden
    codes = model.normal("codec_embedding.weight", shape, _CODE_STD)
    codes[:, _TEXT_OVER] = 0
    _add_text(talker, text_vocab_size, pad_id)
    head = talker.projection("codec_head.weight", shape)
    head[:, _TEXT_OVER] = 0
    head[configs.CODEC_EOS_ID] = 0
    head[configs.CODEC_EOS_ID, _TEXT_OVER] = eos_logit / _NORMED_TEXT_OVER
    _add_code_predictor(talker.under("code_predictor"))


def _add_text(talker: WeightBuilder, vocab_size: int, pad_id: int) -> None:
    """Add the text embedding and its projection; channel 0 is for padding only."""
    width, hidden = configs.TEXT_HIDDEN, configs.TALKER.hidden
    embedding = talker.normal("model.text_embedding.weight", (vocab_size, width), 1.0)
    embedding[:, _TEXT_OVER] = 0
    embedding[pad_id, _TEXT_OVER] = 1
    projection = talker.under("text_projection")
    first, _ = projection.linear("linear_fc1", width, width)
    second, _ = projection.linear("linear_fc2", width, hidden, 2 * _TEXT_STD)
    for weight in (first, second):
        weight[_TEXT_OVER] = 0
        weight[:, _TEXT_OVER] = 0
        weight[_TEXT_OVER, _TEXT_OVER] = 1
    second[_TEXT_OVER, _TEXT_OVER] /= silu(torch.tensor(1.0))


def _add_code_predictor(predictor: WeightBuilder) -> None:
    shape = configs.CODEBOOK_SIZE, configs.CODE_PREDICTOR.hidden
    _add_layers(predictor.under("model"), configs.CODE_PREDICTOR)
    for book in range(configs.NUM_CODEBOOKS - 1):
        name = f"model.codec_embedding.{book}.weight"
        predictor.normal(name, shape, _CODE_STD)[:, _TEXT_OVER] = 0
        predictor.projection(f"lm_head.{book}.weight", shape, 2.0)


def _add_layers(
    model: WeightBuilder, size: TransformerSizes, keep_free: int | None = None
) -> None:
    """Add Qwen3 layers and the last norm; none writes to channel ``keep_free``."""

    def project(layer: WeightBuilder, name: str, shape: Sequence[int]) -> None:
        weight = layer.projection(name, shape, _LAYER_GAIN)
        if keep_free is not None and re.search("(o|down)_proj", name):
            weight[keep_free] = 0

    parts.add_layers(model, size, project, qk_norm=_ATTENTION_SHARPNESS)


# Speech has a standard deviation of about 0.1; the layers behind work at about 1.
_INPUT_GAIN = 25.0
# Latents that spread a few times as wide as the codebooks fall on many entries.
_LATENT_GAIN = 3.0
# How much a layer of the decoder's transformer adds, as at the start of a training.
_LAYER_SCALE = 0.01
# The encoder's layers add more: 0.01 would hide any difference in attention.
_ENCODER_LAYER_SCALE = 0.3
# Bounds of the logarithm of a codebook entry's usage, which every reader divides by.
_CLUSTER_USAGE = (-2.0, 6.0)
# Carries a signal through the speaker encoder's rectifiers undamped.
_SPEAKER_GAIN = 2**0.5
_SPEAKER_EMBEDDING_GAIN = 0.5  # of its last layer, on pooled features
# The decoder clips its output to [-1, 1]; at this gain hardly a sample is clipped.
_OUTPUT_GAIN = 0.05


def add_speaker_encoder(weights: WeightBuilder, config: configs.Json) -> None:
    """Add everything below ``speaker_encoder.``; Qwen2.5-Omni has the same network."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
        Qwen2_5OmniDiTConfig,
    )
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        ECAPA_TimeDelayNet,
    )

    shapes = parts.shapes_of(ECAPA_TimeDelayNet, Qwen2_5OmniDiTConfig(**config))
    parts.add_all(weights.under("speaker_encoder"), shapes, _SPEAKER_RULES)


def add_codec_encoder(weights: WeightBuilder, config: configs.Json) -> None:
    """Add everything below ``encoder.``: what Mimi has, without its decoder."""
    from transformers import MimiConfig, MimiModel

    shapes = parts.shapes_of(MimiModel, MimiConfig(**config))
    shapes = {n: s for n, s in shapes.items() if not re.match("decoder|upsample", n)}
    parts.add_all(weights.under("encoder"), shapes, _ENCODER_RULES)


def _add_usage(codebook: WeightBuilder, name: str, shape: Sequence[int]) -> Tensor:
    return codebook.log_uniform(name, shape, *_CLUSTER_USAGE)


def _add_sums(codebook: WeightBuilder, name: str, shape: Sequence[int]) -> None:
    """Add a codebook's entries, each times its usage, which is drawn once more."""
    total = codebook.normal(name, shape, 1.0)
    usage_name = name.replace("embed_sum", "cluster_usage")
    total *= _add_usage(codebook, usage_name, shape[:1])[:, None]


_SPEAKER_RULES: dict[str, parts.Draw] = {
    "bias$": parts.constant(0.0),
    r"^fc\.": parts.centred(_SPEAKER_EMBEDDING_GAIN),
    "": parts.centred(_SPEAKER_GAIN),
}
_ENCODER_RULES: dict[str, parts.Draw] = {
    "bias$": parts.constant(0.0),
    r"(layernorm\.weight|initialized)$": parts.constant(1.0),
    "layer_scale": parts.constant(_ENCODER_LAYER_SCALE),
    "cluster_usage$": _add_usage,
    "embed_sum$": _add_sums,
    r"input_proj\.": parts.projected(_LATENT_GAIN),
    r"layers\.0\.conv\.": parts.projected(_INPUT_GAIN),
    r"conv\.": parts.centred(),
    "": parts.projected(),
}


def add_codec_decoder(weights: WeightBuilder, config: configs.Json) -> None:
    """Add everything below ``decoder.``: Qwen3-Omni's, with other layers before it."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeCode2WavConfig,
    )
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
        Qwen3OmniMoeCode2Wav,
    )

    decoder = weights.under("decoder")
    shapes = parts.shapes_of(Qwen3OmniMoeCode2Wav, Qwen3OmniMoeCode2WavConfig(**config))
    del shapes["code_embedding.weight"]
    parts.add_all(decoder, shapes, _DECODER_RULES)
    inputs, latent, hidden = (
        config[name] for name in ("codebook_dim", "latent_dim", "hidden_size")
    )
    _add_quantizer(decoder.under("quantizer.rvq_first"), inputs, 1)
    _add_quantizer(
        decoder.under("quantizer.rvq_rest"), inputs, configs.NUM_CODEBOOKS - 1
    )
    decoder.conv("pre_conv.conv", (latent, inputs, 3))
    decoder.linear("pre_transformer.input_proj", latent, hidden)
    decoder.linear("pre_transformer.output_proj", hidden, latent)


def _add_quantizer(quantizer: WeightBuilder, width: int, num_books: int) -> None:
    dim = width // 2
    quantizer.projection("input_proj.weight", (dim, width, 1))
    gain = 1 / math.sqrt(num_books)
    quantizer.projection("output_proj.weight", (width, dim, 1), gain)
    for book in range(num_books):
        codebook = quantizer.under(f"vq.layers.{book}._codebook")
        codebook.fill("cluster_usage", (configs.CODEBOOK_SIZE,), 1.0)
        codebook.normal("embedding_sum", (configs.CODEBOOK_SIZE, dim), 1.0)


def _transposed(num_taps: int) -> parts.Draw:
    """Return a `Draw` of a transposed convolution ``(in, out, kernel)``.

    ``num_taps``, its kernel over its stride, taps of each input meet in an output.
    """
    return lambda weights, name, shape: weights.normal(
        name, shape, 1 / math.sqrt(shape[0] * num_taps)
    )


_DECODER_RULES: dict[str, parts.Draw] = {
    "(bias|alpha|beta)$": parts.constant(0.0),
    r"norm\.weight$": parts.constant(1.0),
    "(layer_scale|gamma)": parts.constant(_LAYER_SCALE),
    r"^upsample\.\d\.0\.": _transposed(1),
    r"block\.1\.conv\.": _transposed(2),
    r"conv\d\.conv\.": parts.projected(0.5),  # of residual units
    # Centred, because the activations before it are never negative: no offset.
    r"^decoder\.[1-9]\.conv\.": parts.centred(_OUTPUT_GAIN),
    "": parts.projected(),
}
