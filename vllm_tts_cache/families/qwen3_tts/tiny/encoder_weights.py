"""Weights of the speaker encoder (ECAPA-TDNN) and of the 12 Hz codec, in float32."""

import math

from vllm_tts_cache.families.qwen3_tts.tiny import sizes
from vllm_tts_cache.families.qwen3_tts.tiny.sizes import (
    CodecDecoderSizes,
    CodecEncoderSizes,
    Gains,
    SpeakerEncoderSizes,
    TransformerSizes,
)
from vllm_tts_cache.testing.tiny_parts import (
    WeightBuilder,
    add_convnext,
    add_layers,
    projected,
)

# Speech has a standard deviation of about 0.1; the layers behind work at about 1.
_INPUT_GAIN = 25.0
# Latents of a few times the codebooks' own spread fall on many entries.
_LATENT_GAIN = 3.0
_LAYER_SCALE = 0.01
# The decoder clips its output to [-1, 1]; at this gain hardly a sample is clipped.
_OUTPUT_GAIN = 0.05


def add_speaker_encoder(
    weights: WeightBuilder, size: SpeakerEncoderSizes, gains: Gains
) -> None:
    """Add everything below ``speaker_encoder.``."""
    encoder = weights.under("speaker_encoder")
    gain, channels, kernels = gains.speaker_encoder, size.channels, size.kernel_sizes
    _add_blind(
        encoder, "blocks.0.conv", (channels[0], sizes.NUM_MEL_BINS, kernels[0]), gain
    )
    for index in (1, 2, 3):
        _add_block(encoder.under(f"blocks.{index}"), size, index, gain)
    pooled = channels[4]
    _add_blind(encoder, "mfa.conv", (pooled, pooled, kernels[4]), gain)
    attention = size.attention_channels
    _add_blind(encoder, "asp.tdnn.conv", (attention, 3 * pooled, 1), gain)
    _add_blind(encoder, "asp.conv", (pooled, attention, 1), gain)
    _add_blind(
        encoder, "fc", (sizes.TALKER.hidden, 2 * pooled, 1), gains.speaker_embedding
    )


def _add_block(
    block: WeightBuilder, size: SpeakerEncoderSizes, index: int, gain: float
) -> None:
    """One squeeze-excitation Res2Net block."""
    inner, outer = size.channels[index - 1], size.channels[index]
    group = outer // size.res2net_scale
    _add_blind(block, "tdnn1.conv", (outer, inner, 1), gain)
    for part in range(size.res2net_scale - 1):
        shape = (group, group, size.kernel_sizes[index])
        _add_blind(block, f"res2net_block.blocks.{part}.conv", shape, gain)
    _add_blind(block, "tdnn2.conv", (outer, outer, 1), gain)
    _add_blind(block, "se_block.conv1", (size.se_channels, outer, 1), gain)
    _add_blind(block, "se_block.conv2", (outer, size.se_channels, 1), gain)


def add_codec_encoder(
    weights: WeightBuilder, size: CodecEncoderSizes, gains: Gains
) -> None:
    """Add everything below ``encoder.``."""
    encoder = weights.under("encoder")
    _add_convolutions(encoder.under("encoder"), size)
    _add_encoder_transformer(
        encoder.under("encoder_transformer"), size.transformer, gains.codec_layer_scale
    )
    hidden = size.transformer.hidden
    encoder.centred("downsample.conv.weight", (hidden, hidden, 4))
    for kind, num_books in (("semantic", 1), ("acoustic", size.num_quantizers - 1)):
        quantizer = encoder.under(f"quantizer.{kind}_residual_vector_quantizer")
        _add_encoder_quantizer(quantizer, size, num_books, gains)


def _add_convolutions(encoder: WeightBuilder, size: CodecEncoderSizes) -> None:
    """The input convolution, one residual block and one stride per ratio, the output.

    Activations take up the indices between.
    """
    width, index = size.num_filters, 0
    _add_conv(encoder, "layers.0.conv", (width, 1, 7), _INPUT_GAIN)
    for stride in reversed(size.upsampling_ratios):
        block = encoder.under(f"layers.{index + 1}.block")
        _add_blind(block, "1.conv", (width // 2, width, 3))
        _add_blind(block, "3.conv", (width, width // 2, 1))
        index += 3
        _add_blind(encoder, f"layers.{index}.conv", (2 * width, width, 2 * stride))
        width *= 2
    _add_blind(encoder, f"layers.{index + 2}.conv", (size.transformer.hidden, width, 3))


def _add_encoder_transformer(
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


def _add_encoder_quantizer(
    quantizer: WeightBuilder, size: CodecEncoderSizes, num_books: int, gains: Gains
) -> None:
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


def add_codec_decoder(weights: WeightBuilder, size: CodecDecoderSizes) -> None:
    """Add everything below ``decoder.``."""
    decoder = weights.under("decoder")
    _add_quantizer(decoder.under("quantizer.rvq_first"), size, 1)
    _add_quantizer(decoder.under("quantizer.rvq_rest"), size, sizes.NUM_CODEBOOKS - 1)
    _add_conv(decoder, "pre_conv.conv", (size.latent_dim, size.codebook_dim, 3))
    _add_transformer(decoder.under("pre_transformer"), size)
    for index, factor in enumerate(size.upsampling_ratios):
        stage = decoder.under(f"upsample.{index}")
        _add_transposed(stage, "0", (size.latent_dim, size.latent_dim), factor, factor)
        add_convnext(stage.under("1"), size.latent_dim, _LAYER_SCALE)
    _add_synthesis(decoder.under("decoder"), size)


def _add_quantizer(
    quantizer: WeightBuilder, size: CodecDecoderSizes, num_books: int
) -> None:
    dim = size.codebook_dim // 2
    quantizer.projection("input_proj.weight", (dim, size.codebook_dim, 1))
    quantizer.projection(
        "output_proj.weight", (size.codebook_dim, dim, 1), 1 / math.sqrt(num_books)
    )
    for book in range(num_books):
        codebook = quantizer.under(f"vq.layers.{book}._codebook")
        codebook.fill("cluster_usage", (sizes.CODEBOOK_SIZE,), 1.0)
        codebook.normal("embedding_sum", (sizes.CODEBOOK_SIZE, dim), 1.0)


def _add_transformer(model: WeightBuilder, size: CodecDecoderSizes) -> None:
    inner = size.transformer
    model.linear("input_proj", size.latent_dim, inner.hidden)
    model.linear("output_proj", inner.hidden, size.latent_dim)
    add_layers(model, inner, projected())
    for index in range(inner.num_layers):
        for part in ("self_attn_layer_scale", "mlp_layer_scale"):
            name = f"layers.{index}.{part}.scale"
            model.fill(name, (inner.hidden,), _LAYER_SCALE)


def _add_synthesis(decoder: WeightBuilder, size: CodecDecoderSizes) -> None:
    """From latents to samples: each stage upsamples and halves the width."""
    width = size.decoder_dim
    _add_conv(decoder, "0.conv", (width, size.latent_dim, 7))
    for index, rate in enumerate(size.upsample_rates, start=1):
        stage = decoder.under(f"{index}.block")
        _add_snake(stage, "0", width)
        _add_transposed(stage, "1", (width, width // 2), 2 * rate, rate)
        width //= 2
        for unit in (2, 3, 4):
            _add_residual_unit(stage.under(str(unit)), width)
    last = len(size.upsample_rates) + 1
    _add_snake(decoder, str(last), width)
    # Centred, because the activations before it are never negative: no offset.
    _add_blind(decoder, f"{last + 1}.conv", (1, width, 7), _OUTPUT_GAIN)


def _add_residual_unit(unit: WeightBuilder, width: int) -> None:
    _add_snake(unit, "act1", width)
    _add_conv(unit, "conv1.conv", (width, width, 7), 0.5)
    _add_snake(unit, "act2", width)
    _add_conv(unit, "conv2.conv", (width, width, 1), 0.5)


def _add_snake(weights: WeightBuilder, name: str, width: int) -> None:
    for parameter in ("alpha", "beta"):
        weights.fill(f"{name}.{parameter}", (width,), 0.0)


def _add_transposed(
    weights: WeightBuilder, name: str, widths: tuple[int, int], kernel: int, stride: int
) -> None:
    """A transposed convolution; ``kernel / stride`` inputs meet in an output."""
    std = 1 / math.sqrt(widths[0] * kernel / stride)
    weights.normal(f"{name}.conv.weight", (*widths, kernel), std)
    weights.fill(f"{name}.conv.bias", widths[1:], 0.0)


def _add_conv(
    weights: WeightBuilder, name: str, shape: tuple[int, int, int], gain: float = 1.0
) -> None:
    weights.projection(f"{name}.weight", shape, gain)
    weights.fill(f"{name}.bias", shape[:1], 0.0)


def _add_blind(
    weights: WeightBuilder, name: str, shape: tuple[int, int, int], gain: float = 1.0
) -> None:
    weights.centred(f"{name}.weight", shape, gain)
    weights.fill(f"{name}.bias", shape[:1], 0.0)
