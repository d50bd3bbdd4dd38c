"""Write a tiny Fish Speech S2 Pro checkpoint with random weights. Not a model."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from vllm_tts_cache.families.fish_speech.sizes import RELEASED, CodecSizes
from vllm_tts_cache.families.networks.dac.tiny import DacParts
from vllm_tts_cache.families.networks.torch_file import write_torch_file
from vllm_tts_cache.testing import tiny_checkpoint as tiny
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

Json = dict[str, object]

# Fixed by the released model, whatever the size of the networks. The host compares
# generated ids with some of the text ids as numbers, so all of them stay.
VOCAB_SIZE = 155_776
NUM_CODEBOOKS = 10
SEMANTIC_CODEBOOK_SIZE = 4_096
RESIDUAL_CODEBOOK_SIZE = 1_024
CODEBOOK_DIM = 8
ENCODER_RATES, DECODER_RATES = (2, 4, 8, 8), (8, 8, 4, 2)
HEAD_DIM_IN_CODEC = 64

SLOW_AR = tiny.TransformerSizes(
    hidden=256, intermediate=768, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64
)
FAST_AR = tiny.TransformerSizes(
    hidden=256, intermediate=768, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64
)
CODEC: dict[tiny.EncoderSize, CodecSizes] = {
    "tiny": CodecSizes(
        encoder_dim=8, decoder_dim=96, quantizer_layers=1, encoder_layers=1
    ),
    "real": RELEASED,
}

AUDIO_PAD = "<|audio_pad|>"
FIRST_SEMANTIC_ID = 151_678
# Where the released tokenizer has them.
CONTROL_IDS: dict[str, int] = {
    parts.END_OF_TEXT: 151_643,
    parts.IM_START: 151_644,
    parts.IM_END: 151_645,
    **{f"<|speaker:{i}|>": 151_650 + i for i in range(8)},
    "<|phoneme_start|>": 151_671,
    "<|phoneme_end|>": 151_672,
    "<|voice|>": 151_673,
    "<|text|>": 151_674,
    "<|audio_start|>": 151_675,
    "<|audio_end|>": 151_676,
    AUDIO_PAD: 151_677,
}

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
    special = CONTROL_IDS | {
        f"<|semantic:{code}|>": FIRST_SEMANTIC_ID + code
        for code in range(SEMANTIC_CODEBOOK_SIZE)
    }
    ends = {"end": parts.IM_END, "pad": parts.END_OF_TEXT}
    parts.save_byte_tokenizer(directory, special, vocab_size=VOCAB_SIZE, **ends)
    report("language models")
    models = WeightBuilder(options.seed)
    add_slow_ar(models)
    add_fast_ar(models)
    parts.save_weights(directory / "model.safetensors", models.tensors, torch.bfloat16)
    parts.save_json(directory / "config.json", model_config())
    parts.save_json(directory / "generation_config.json", end_ids())
    report("codec")
    size = CODEC[options.encoders]
    codec = WeightBuilder(options.seed)
    add_codec(codec, size)
    # Of the layouts in circulation, one that the host reads as well.
    write_torch_file(directory / "codec.pth", {"generator": codec.tensors})
    if options.encoders != "real":
        parts.save_json(directory / "codec.json", msgspec.structs.asdict(size))


def model_config() -> Json:
    """Return ``config.json``."""
    return {
        "architectures": ["FishSpeechSlowARForConditionalGeneration"],
        "model_type": "fish_qwen3_omni",
        "dtype": "bfloat16",
        "semantic_start_token_id": FIRST_SEMANTIC_ID,
        "semantic_end_token_id": FIRST_SEMANTIC_ID + SEMANTIC_CODEBOOK_SIZE - 1,
        "audio_pad_token_id": CONTROL_IDS[AUDIO_PAD],
        **end_ids(),
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "fish_qwen3",
            **_transformer(SLOW_AR),
            "vocab_size": VOCAB_SIZE,
            "codebook_size": SEMANTIC_CODEBOOK_SIZE,
            "attention_qk_norm": True,
            "max_seq_len": 32_768,
            "tie_word_embeddings": True,
        },
        "audio_decoder_config": {
            "model_type": "fish_qwen3_audio_decoder",
            **_transformer(FAST_AR),
            "vocab_size": SEMANTIC_CODEBOOK_SIZE,
            "attention_qk_norm": False,
            "max_seq_len": NUM_CODEBOOKS + 1,
            "text_dim": SLOW_AR.hidden,
            "audio_hidden_dim": 2 * FAST_AR.hidden,
        },
    }


def end_ids() -> Json:
    """Return the ids of the end and padding tokens, as two files have them."""
    return {
        "eos_token_id": CONTROL_IDS[parts.IM_END],
        "pad_token_id": CONTROL_IDS[parts.END_OF_TEXT],
    }


def _transformer(size: tiny.TransformerSizes) -> Json:
    return {
        "dim": size.hidden,
        "intermediate_size": size.intermediate,
        "n_layer": size.num_layers,
        "n_head": size.num_heads,
        "n_local_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "num_codebooks": NUM_CODEBOOKS,
        "rope_base": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
    }


def add_slow_ar(weights: WeightBuilder) -> None:
    """Add everything below ``text_model.``."""
    model = weights.under("text_model.model")
    shape = (VOCAB_SIZE, SLOW_AR.hidden)
    model.normal("embeddings.weight", shape, _EMBEDDING_STD)
    norm = SLOW_AR.head_dim, _ATTENTION_SHARPNESS
    norms = {f"attention.{each}_norm.weight": norm for each in ("q", "k")}
    _add_layers(model, SLOW_AR, parts.normal(_PROJECTION_STD), norms)


def add_fast_ar(weights: WeightBuilder) -> None:
    """Add everything below ``audio_decoder.``, the slow one's code embeddings too."""
    decoder = weights.under("audio_decoder")
    hidden, num_codes = FAST_AR.hidden, SEMANTIC_CODEBOOK_SIZE
    shape = num_codes * NUM_CODEBOOKS, SLOW_AR.hidden
    decoder.normal("codebook_embeddings.weight", shape, _EMBEDDING_STD)
    decoder.normal("embeddings.weight", (num_codes, hidden), 1.0)
    decoder.normal("output.weight", (num_codes, hidden), _PROJECTION_STD)
    _add_layers(decoder, FAST_AR, parts.normal(_PROJECTION_STD), {})


def _add_layers(
    model: WeightBuilder,
    size: tiny.TransformerSizes,
    project: parts.Draw,
    vectors: Mapping[str, tuple[int, float]],
) -> None:
    """Add all layers and the last norm.

    ``project`` adds a weight of a projection; ``vectors`` has the name of a layer's
    further vector -> its width and its values.
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
    encoder, last = weights.under("encoder.block"), len(ENCODER_RATES)
    width = _PARTS.add_down(encoder, size.encoder_dim, ENCODER_RATES)
    _add_transformer(encoder.under(f"{last}.block.5"), width, size.encoder_layers)
    _PARTS.add_snake(encoder, str(last + 1), width)
    _PARTS.add_conv(encoder, str(last + 2), (size.latent_dim, width, 3))
    _add_quantizer(weights.under("quantizer"), size)
    decoder, width = weights.under("decoder.model"), size.decoder_dim
    _PARTS.add_conv(decoder, "0", (width, size.latent_dim, 7))
    rates = DECODER_RATES
    _PARTS.add_up(decoder, width, rates, first=1, output_gain=_OUTPUT_GAIN)


def _add_quantizer(quantizer: WeightBuilder, size: CodecSizes) -> None:
    width = size.latent_dim
    for part in ("pre_module", "post_module"):
        _add_transformer(quantizer.under(part), width, size.quantizer_layers)
    for index in range(2):
        _add_resampling(quantizer.under(f"downsample.{index}"), width, num_taps=2)
        _add_resampling(quantizer.under(f"upsample.{index}"), width, num_taps=1)
    semantic = quantizer.under("semantic_quantizer.quantizers.0")
    _add_codebook(semantic, width, SEMANTIC_CODEBOOK_SIZE)
    for book in range(NUM_CODEBOOKS - 1):
        residual = quantizer.under(f"quantizer.quantizers.{book}")
        _add_codebook(residual, width, RESIDUAL_CODEBOOK_SIZE)


def _add_resampling(stage: WeightBuilder, width: int, *, num_taps: int) -> None:
    """Add a convolution by a factor of 2, and a ConvNeXt block.

    ``num_taps`` taps of the convolution meet in an output.
    """
    stage.normal("0.conv.weight", (width, width, 2), (width * num_taps) ** -0.5)
    stage.fill("0.conv.bias", (width,), 0.0)
    block = stage.under("1")
    block.conv("dwconv.conv", (width, 1, 7))
    block.fill("norm.weight", (width,), 1.0)
    block.fill("norm.bias", (width,), 0.0)
    block.linear("pwconv1", width, 4 * width)
    block.linear("pwconv2", 4 * width, width)
    block.fill("gamma", (width,), _LAYER_SCALE)


def _add_codebook(book: WeightBuilder, width: int, num_codes: int) -> None:
    for name, outputs, inputs, gain in (
        ("in_proj", CODEBOOK_DIM, width, 1.0),
        ("out_proj", width, CODEBOOK_DIM, _CODE_GAIN),
    ):
        projection = book.under(name)
        projection.normal("weight_v", (outputs, inputs, 1), 1.0)
        projection.fill("weight_g", (outputs, 1, 1), gain)
        projection.fill("bias", (outputs,), 0.0)
    book.normal("codebook.weight", (num_codes, CODEBOOK_DIM), 1.0)


def _add_transformer(model: WeightBuilder, width: int, num_layers: int) -> None:
    num_heads = width // HEAD_DIM_IN_CODEC
    size = tiny.TransformerSizes(
        hidden=width,
        intermediate=3 * width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=HEAD_DIM_IN_CODEC,
    )
    scale = width, _LAYER_SCALE
    scales = {f"{each}_layer_scale.gamma": scale for each in ("attention", "ffn")}
    _add_layers(model, size, parts.projected(), scales)
