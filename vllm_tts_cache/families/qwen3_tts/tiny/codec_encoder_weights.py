"""Weights of the 12 Hz codec's encoder (Mimi), in float32."""

from vllm_tts_cache.families.qwen3_tts.tiny import sizes
from vllm_tts_cache.families.qwen3_tts.tiny.gains import Gains
from vllm_tts_cache.families.qwen3_tts.tiny.sizes import (
    CodecEncoderSizes,
    TransformerSizes,
)
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

# Speech has a standard deviation of about 0.1; the layers behind work at about 1.
_INPUT_GAIN = 25.0
# Latents of a few times the codebooks' own spread fall on many entries.
_LATENT_GAIN = 3.0


def add_codec_encoder(
    weights: WeightBuilder, size: CodecEncoderSizes, gains: Gains
) -> None:
    """Add everything below ``encoder.``."""
    encoder = weights.under("encoder")
    _add_convolutions(encoder.under("encoder"), size)
    _add_transformer(
        encoder.under("encoder_transformer"), size.transformer, gains.codec_layer_scale
    )
    hidden = size.transformer.hidden
    encoder.centred("downsample.conv.weight", (hidden, hidden, 4))
    _add_quantizer(encoder, "semantic_residual_vector_quantizer", size, 1, gains)
    rest = size.num_quantizers - 1
    _add_quantizer(encoder, "acoustic_residual_vector_quantizer", size, rest, gains)


def _add_convolutions(encoder: WeightBuilder, size: CodecEncoderSizes) -> None:
    """The input convolution, one residual block and one stride per ratio, the output.

    Activations take up the indices between.
    """
    width, index = size.num_filters, 0
    encoder.projection("layers.0.conv.weight", (width, 1, 7), _INPUT_GAIN)
    encoder.fill("layers.0.conv.bias", (width,), 0.0)
    for stride in reversed(size.upsampling_ratios):
        block = encoder.under(f"layers.{index + 1}.block")
        _add_conv(block, "1", (width // 2, width, 3))
        _add_conv(block, "3", (width, width // 2, 1))
        index += 3
        _add_conv(encoder, f"layers.{index}", (2 * width, width, 2 * stride))
        width *= 2
    _add_conv(encoder, f"layers.{index + 2}", (size.transformer.hidden, width, 3))


def _add_conv(encoder: WeightBuilder, name: str, shape: tuple[int, int, int]) -> None:
    encoder.centred(f"{name}.conv.weight", shape)
    encoder.fill(f"{name}.conv.bias", shape[:1], 0.0)


def _add_transformer(
    transformer: WeightBuilder, size: TransformerSizes, layer_scale: float
) -> None:
    for index in range(size.num_layers):
        layer = transformer.under(f"layers.{index}")
        for name, shape in size.projections.items():
            if name.startswith("self_attn."):
                layer.projection(f"{name}.weight", shape)
        layer.projection("mlp.fc1.weight", (size.intermediate, size.hidden))
        layer.projection("mlp.fc2.weight", (size.hidden, size.intermediate))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            layer.fill(f"{norm}.weight", (size.hidden,), 1.0)
            layer.fill(f"{norm}.bias", (size.hidden,), 0.0)
        for part in ("self_attn_layer_scale", "mlp_layer_scale"):
            layer.fill(f"{part}.scale", (size.hidden,), layer_scale)


def _add_quantizer(
    encoder: WeightBuilder,
    name: str,
    size: CodecEncoderSizes,
    num_books: int,
    gains: Gains,
) -> None:
    quantizer = encoder.under(f"quantizer.{name}")
    hidden, dim = size.transformer.hidden, size.codebook_dim
    quantizer.projection("input_proj.weight", (dim, hidden, 1), _LATENT_GAIN)
    quantizer.projection("output_proj.weight", (hidden, dim, 1))
    for book in range(num_books):
        codebook = quantizer.under(f"layers.{book}.codebook")
        usage = codebook.log_uniform(
            "cluster_usage", (sizes.CODEBOOK_SIZE,), *gains.cluster_usage
        )
        total = codebook.normal("embed_sum", (sizes.CODEBOOK_SIZE, dim), 1.0)
        total *= usage[:, None]
        codebook.fill("initialized", (1,), 1.0)
