"""Write a tiny Fish Speech S2 Pro checkpoint with random weights. Not a model."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from vllm_tts_cache.families.fish_speech.sizes import CodecSizes
from vllm_tts_cache.families.fish_speech.tiny import configs
from vllm_tts_cache.families.networks.dac.tiny import DacParts
from vllm_tts_cache.testing import tiny_checkpoint as tiny
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

_PROJECTION_STD = 0.08
_EMBEDDING_STD = 0.3
_ATTENTION_SHARPNESS = 2.0

# The rest is the codec's.
# With 0.01, as at the start of a training, a layer would add next to nothing.
_LAYER_SCALE = 0.3
# A code removes about as much as it leaves, so every codebook has work to do.
_CODE_GAIN = 0.5
# The output goes through a tanh; at this gain it hardly bends.
_OUTPUT_GAIN = 0.03
_PARTS = DacParts(
    conv=".conv",
    direction="parametrizations.weight.original1",
    norm="parametrizations.weight.original0",
)


def write(directory: Path, options: tiny.EncoderOptions, report: tiny.Report) -> None:
    """Fill an empty directory; called as the family's ``tiny_part``.

    With ``real`` encoders the codec has its released sizes (a ``codec.pth`` of 1.5 GB).
    Else ``codec.json`` holds the smaller ones.
    """
    report("text tokenizer")
    configs.save_text_tokenizer(directory)
    report("language models")
    models = WeightBuilder(options.seed)
    add_slow_ar(models)
    add_fast_ar(models)
    parts.save_weights(directory / "model.safetensors", models.tensors, torch.bfloat16)
    parts.save_json(directory / "config.json", configs.model_config())
    parts.save_json(directory / "generation_config.json", configs.end_ids())
    report("codec")
    size = configs.CODEC[options.encoders]
    codec = WeightBuilder(options.seed)
    add_codec(codec, size)
    # Through a file of ours: a full disk is an OSError there, not a RuntimeError.
    with (directory / "codec.pth").open("wb") as file:
        # Of the layouts in circulation, one that the host reads as well.
        torch.save({"generator": codec.tensors}, file)
    if options.encoders != "real":
        parts.save_json(directory / "codec.json", asdict(size))


def add_slow_ar(weights: WeightBuilder) -> None:
    """Add everything below ``text_model.``."""
    model = weights.under("text_model.model")
    shape = (configs.VOCAB_SIZE, configs.SLOW_AR.hidden)
    model.normal("embeddings.weight", shape, _EMBEDDING_STD)
    norm = configs.SLOW_AR.head_dim, _ATTENTION_SHARPNESS
    norms = {f"attention.{each}_norm.weight": norm for each in ("q", "k")}
    _add_layers(model, configs.SLOW_AR, parts.normal(_PROJECTION_STD), norms)


def add_fast_ar(weights: WeightBuilder) -> None:
    """Add everything below ``audio_decoder.``, the slow one's code embeddings too."""
    decoder = weights.under("audio_decoder")
    hidden, num_codes = configs.FAST_AR.hidden, configs.SEMANTIC_CODEBOOK_SIZE
    shape = num_codes * configs.NUM_CODEBOOKS, configs.SLOW_AR.hidden
    decoder.normal("codebook_embeddings.weight", shape, _EMBEDDING_STD)
    decoder.normal("embeddings.weight", (num_codes, hidden), 1.0)
    decoder.normal("output.weight", (num_codes, hidden), _PROJECTION_STD)
    _add_layers(decoder, configs.FAST_AR, parts.normal(_PROJECTION_STD), {})


def _add_layers(
    model: WeightBuilder,
    size: tiny.TransformerSizes,
    project: parts.Draw,
    vectors: Mapping[str, tuple[int, float]],
) -> None:
    """Add all layers and the last norm.

    Args:
        model: Where they are added.
        size: Number and widths of the layers.
        project: Adds a weight of a projection.
        vectors: Name of a layer's further vector -> its width and its values.
    """
    heads, kv_heads = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    shapes = {
        "attention.wqkv": (heads + 2 * kv_heads, size.hidden),
        "attention.wo": (size.hidden, heads),
        "feed_forward.w1": (size.intermediate, size.hidden),
        "feed_forward.w2": (size.hidden, size.intermediate),
        "feed_forward.w3": (size.intermediate, size.hidden),
    }
    for index in range(size.num_layers):
        layer = model.under(f"layers.{index}")
        for name, shape in shapes.items():
            project(layer, f"{name}.weight", shape)
        for norm in ("attention_norm", "ffn_norm"):
            layer.fill(f"{norm}.weight", (size.hidden,), 1.0)
        for name, (width, value) in vectors.items():
            layer.fill(name, (width,), value)
    model.fill("norm.weight", (size.hidden,), 1.0)


def add_codec(weights: WeightBuilder, size: CodecSizes) -> None:
    """Add the whole codec, in the spelling that the released file has."""
    _add_encoder(weights.under("encoder.block"), size)
    _add_quantizer(weights.under("quantizer"), size)
    decoder, width = weights.under("decoder.model"), size.decoder_dim
    _PARTS.add_conv(decoder, "0", (width, size.latent_dim, 7))
    rates = configs.DECODER_RATES
    _PARTS.add_up(decoder, width, rates, first=1, output_gain=_OUTPUT_GAIN)


def _add_encoder(encoder: WeightBuilder, size: CodecSizes) -> None:
    """Add the layers from samples to latents."""
    width = _PARTS.add_down(encoder, size.encoder_dim, configs.ENCODER_RATES)
    last = len(configs.ENCODER_RATES)
    _add_transformer(encoder.under(f"{last}.block.5"), width, size.encoder_layers)
    _PARTS.add_snake(encoder, str(last + 1), width)
    _PARTS.add_conv(encoder, str(last + 2), (size.latent_dim, width, 3))


def _add_quantizer(quantizer: WeightBuilder, size: CodecSizes) -> None:
    width = size.latent_dim
    for part in ("pre_module", "post_module"):
        _add_transformer(quantizer.under(part), width, size.quantizer_layers)
    for index in range(2):
        _add_resampling(quantizer.under(f"downsample.{index}"), width, num_taps=2)
        _add_resampling(quantizer.under(f"upsample.{index}"), width, num_taps=1)
    semantic = quantizer.under("semantic_quantizer.quantizers.0")
    _add_codebook(semantic, width, configs.SEMANTIC_CODEBOOK_SIZE)
    for book in range(configs.NUM_CODEBOOKS - 1):
        residual = quantizer.under(f"quantizer.quantizers.{book}")
        _add_codebook(residual, width, configs.RESIDUAL_CODEBOOK_SIZE)


def _add_resampling(stage: WeightBuilder, width: int, *, num_taps: int) -> None:
    """Add a convolution by a factor of 2; ``num_taps`` taps meet in an output."""
    stage.normal("0.conv.weight", (width, width, 2), (width * num_taps) ** -0.5)
    stage.fill("0.conv.bias", (width,), 0.0)
    parts.add_convnext(stage.under("1"), width, _LAYER_SCALE)


def _add_codebook(book: WeightBuilder, width: int, num_codes: int) -> None:
    for name, outputs, inputs, gain in (
        ("in_proj", configs.CODEBOOK_DIM, width, 1.0),
        ("out_proj", width, configs.CODEBOOK_DIM, _CODE_GAIN),
    ):
        projection = book.under(name)
        projection.normal("weight_v", (outputs, inputs, 1), 1.0)
        projection.fill("weight_g", (outputs, 1, 1), gain)
        projection.fill("bias", (outputs,), 0.0)
    book.normal("codebook.weight", (num_codes, configs.CODEBOOK_DIM), 1.0)


def _add_transformer(model: WeightBuilder, width: int, num_layers: int) -> None:
    num_heads = width // configs.HEAD_DIM_IN_CODEC
    size = tiny.TransformerSizes(
        hidden=width,
        intermediate=3 * width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=configs.HEAD_DIM_IN_CODEC,
    )
    scale = width, _LAYER_SCALE
    scales = {f"{each}_layer_scale.gamma": scale for each in ("attention", "ffn")}
    _add_layers(model, size, parts.projected(), scales)
