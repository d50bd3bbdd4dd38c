"""Write a tiny Fish Speech S2 Pro checkpoint with random weights. Not a model."""

from dataclasses import asdict
from pathlib import Path

import torch

from vllm_tts_cache.families.fish_speech.tiny import configs
from vllm_tts_cache.families.fish_speech.tiny.codec_weights import add_codec
from vllm_tts_cache.families.fish_speech.tiny.configs import (
    TransformerSizes,
    save_text_tokenizer,
)
from vllm_tts_cache.testing.tiny_checkpoint import EncoderOptions, Report
from vllm_tts_cache.testing.tiny_parts import WeightBuilder, save_json, save_weights

_PROJECTION_STD = 0.08
_EMBEDDING_STD = 0.3
_ATTENTION_SHARPNESS = 2.0


def write(directory: Path, options: EncoderOptions, report: Report) -> None:
    """Fill an empty directory; called through `TINY`.

    With ``real`` encoders the codec has its released sizes (a ``codec.pth`` of 1.5 GB).
    Else ``codec.json`` holds the smaller ones.
    """
    report("text tokenizer")
    save_text_tokenizer(directory)
    report("language models")
    models = WeightBuilder(options.seed)
    add_slow_ar(models)
    add_fast_ar(models)
    save_weights(directory / "model.safetensors", models.tensors, torch.bfloat16)
    save_json(directory / "config.json", configs.model_config())
    save_json(directory / "generation_config.json", configs.end_ids())
    report("codec")
    size = configs.CODEC[options.encoders]
    codec = WeightBuilder(options.seed)
    add_codec(codec, size)
    # Through a file of ours: a full disk is an OSError there, not a RuntimeError.
    with (directory / "codec.pth").open("wb") as file:
        # Of the forms that are about, one that the host reads as well.
        torch.save({"generator": codec.tensors}, file)
    if options.encoders != "real":
        save_json(directory / "codec.json", asdict(size))


def add_slow_ar(weights: WeightBuilder) -> None:
    """Add everything below ``text_model.``."""
    model = weights.under("text_model.model")
    shape = (configs.VOCAB_SIZE, configs.SLOW_AR.hidden)
    model.normal("embeddings.weight", shape, _EMBEDDING_STD)
    _add_layers(model, configs.SLOW_AR, qk_norm=True)


def add_fast_ar(weights: WeightBuilder) -> None:
    """Add everything below ``audio_decoder.``, the slow one's code embeddings too."""
    decoder = weights.under("audio_decoder")
    size, hidden = configs.FAST_AR, configs.FAST_AR.hidden
    num_codes = configs.SEMANTIC_CODEBOOK_SIZE
    decoder.normal(
        "codebook_embeddings.weight",
        (num_codes * configs.NUM_CODEBOOKS, configs.SLOW_AR.hidden),
        _EMBEDDING_STD,
    )
    decoder.normal("embeddings.weight", (num_codes, hidden), 1.0)
    decoder.normal("output.weight", (num_codes, hidden), _PROJECTION_STD)
    _add_layers(decoder, size, qk_norm=False)


def _add_layers(model: WeightBuilder, size: TransformerSizes, *, qk_norm: bool) -> None:
    """All layers and the last norm."""
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
            layer.normal(f"{name}.weight", shape, _PROJECTION_STD)
        for norm in ("q_norm", "k_norm") if qk_norm else ():
            layer.fill(
                f"attention.{norm}.weight", (size.head_dim,), _ATTENTION_SHARPNESS
            )
        for norm in ("attention_norm", "ffn_norm"):
            layer.fill(f"{norm}.weight", (size.hidden,), 1.0)
    model.fill("norm.weight", (size.hidden,), 1.0)
