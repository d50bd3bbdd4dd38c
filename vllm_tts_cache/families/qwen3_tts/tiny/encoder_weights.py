"""Weights of the speaker encoder (ECAPA-TDNN) and of the 12 Hz codec, in float32."""

import math

from vllm_tts_cache.families.qwen3_tts.tiny import sizes
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

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


def add_speaker_encoder(
    weights: WeightBuilder, size: sizes.SpeakerEncoderSizes
) -> None:
    """Add everything below ``speaker_encoder.``."""
    encoder = weights.under("speaker_encoder")
    gain, channels, kernels = _SPEAKER_GAIN, size.channels, size.kernel_sizes
    shape = channels[0], sizes.NUM_MEL_BINS, kernels[0]
    _add_conv(encoder, "blocks.0.conv", shape, gain)
    for index in (1, 2, 3):
        _add_block(encoder.under(f"blocks.{index}"), size, index, gain)
    pooled = channels[4]
    _add_conv(encoder, "mfa.conv", (pooled, pooled, kernels[4]), gain)
    attention = size.attention_channels
    _add_conv(encoder, "asp.tdnn.conv", (attention, 3 * pooled, 1), gain)
    _add_conv(encoder, "asp.conv", (pooled, attention, 1), gain)
    shape = sizes.TALKER.hidden, 2 * pooled, 1
    _add_conv(encoder, "fc", shape, _SPEAKER_EMBEDDING_GAIN)


def _add_block(
    block: WeightBuilder, size: sizes.SpeakerEncoderSizes, index: int, gain: float
) -> None:
    """Add one squeeze-excitation Res2Net block."""
    inner, outer = size.channels[index - 1], size.channels[index]
    group = outer // size.res2net_scale
    _add_conv(block, "tdnn1.conv", (outer, inner, 1), gain)
    for part in range(size.res2net_scale - 1):
        shape = (group, group, size.kernel_sizes[index])
        _add_conv(block, f"res2net_block.blocks.{part}.conv", shape, gain)
    _add_conv(block, "tdnn2.conv", (outer, outer, 1), gain)
    _add_conv(block, "se_block.conv1", (size.se_channels, outer, 1), gain)
    _add_conv(block, "se_block.conv2", (outer, size.se_channels, 1), gain)


def add_codec_encoder(weights: WeightBuilder, size: sizes.CodecEncoderSizes) -> None:
    """Add everything below ``encoder.``."""
    encoder = weights.under("encoder")
    _add_convolutions(encoder.under("encoder"), size)
    _add_encoder_transformer(encoder.under("encoder_transformer"), size.transformer)
    hidden = size.transformer.hidden
    encoder.centred("downsample.conv.weight", (hidden, hidden, 4))
    for kind, num_books in (("semantic", 1), ("acoustic", size.num_quantizers - 1)):
        quantizer = encoder.under(f"quantizer.{kind}_residual_vector_quantizer")
        _add_encoder_quantizer(quantizer, size, num_books)


def _add_convolutions(encoder: WeightBuilder, size: sizes.CodecEncoderSizes) -> None:
    """Add the input, one residual block and one stride per ratio, and the output.

    The indices that are left out are those of activations.
    """
    width, index = size.num_filters, 0
    encoder.conv("layers.0.conv", (width, 1, 7), _INPUT_GAIN)
    for stride in reversed(size.upsampling_ratios):
        block = encoder.under(f"layers.{index + 1}.block")
        _add_conv(block, "1.conv", (width // 2, width, 3))
        _add_conv(block, "3.conv", (width, width // 2, 1))
        index += 3
        _add_conv(encoder, f"layers.{index}.conv", (2 * width, width, 2 * stride))
        width *= 2
    _add_conv(encoder, f"layers.{index + 2}.conv", (size.transformer.hidden, width, 3))


def _add_encoder_transformer(
    transformer: WeightBuilder, size: sizes.TransformerSizes
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
            layer.fill(f"{part}.scale", (size.hidden,), _ENCODER_LAYER_SCALE)


def _add_encoder_quantizer(
    quantizer: WeightBuilder, size: sizes.CodecEncoderSizes, num_books: int
) -> None:
    hidden, dim = size.transformer.hidden, size.codebook_dim
    quantizer.projection("input_proj.weight", (dim, hidden, 1), _LATENT_GAIN)
    quantizer.projection("output_proj.weight", (hidden, dim, 1))
    for book in range(num_books):
        codebook = quantizer.under(f"layers.{book}.codebook")
        used = (sizes.CODEBOOK_SIZE,)
        usage = codebook.log_uniform("cluster_usage", used, *_CLUSTER_USAGE)
        total = codebook.normal("embed_sum", (sizes.CODEBOOK_SIZE, dim), 1.0)
        total *= usage[:, None]
        codebook.fill("initialized", (1,), 1.0)


def add_codec_decoder(weights: WeightBuilder, size: sizes.CodecDecoderSizes) -> None:
    """Add everything below ``decoder.``."""
    decoder = weights.under("decoder")
    _add_quantizer(decoder.under("quantizer.rvq_first"), size, 1)
    _add_quantizer(decoder.under("quantizer.rvq_rest"), size, sizes.NUM_CODEBOOKS - 1)
    decoder.conv("pre_conv.conv", (size.latent_dim, size.codebook_dim, 3))
    _add_transformer(decoder.under("pre_transformer"), size)
    for index, factor in enumerate(size.upsampling_ratios):
        stage = decoder.under(f"upsample.{index}")
        _add_transposed(stage, "0", (size.latent_dim, size.latent_dim), factor, factor)
        parts.add_convnext(stage.under("1"), size.latent_dim, _LAYER_SCALE)
    _add_synthesis(decoder.under("decoder"), size)


def _add_quantizer(
    quantizer: WeightBuilder, size: sizes.CodecDecoderSizes, num_books: int
) -> None:
    dim = size.codebook_dim // 2
    quantizer.projection("input_proj.weight", (dim, size.codebook_dim, 1))
    gain = 1 / math.sqrt(num_books)
    quantizer.projection("output_proj.weight", (size.codebook_dim, dim, 1), gain)
    for book in range(num_books):
        codebook = quantizer.under(f"vq.layers.{book}._codebook")
        codebook.fill("cluster_usage", (sizes.CODEBOOK_SIZE,), 1.0)
        codebook.normal("embedding_sum", (sizes.CODEBOOK_SIZE, dim), 1.0)


def _add_transformer(model: WeightBuilder, size: sizes.CodecDecoderSizes) -> None:
    inner = size.transformer
    model.linear("input_proj", size.latent_dim, inner.hidden)
    model.linear("output_proj", inner.hidden, size.latent_dim)
    parts.add_layers(model, inner, parts.projected())
    for index in range(inner.num_layers):
        for part in ("self_attn_layer_scale", "mlp_layer_scale"):
            name = f"layers.{index}.{part}.scale"
            model.fill(name, (inner.hidden,), _LAYER_SCALE)


def _add_synthesis(decoder: WeightBuilder, size: sizes.CodecDecoderSizes) -> None:
    """Add stages from latents to samples; each upsamples and halves the width."""
    width = size.decoder_dim
    decoder.conv("0.conv", (width, size.latent_dim, 7))
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
    _add_conv(decoder, f"{last + 1}.conv", (1, width, 7), _OUTPUT_GAIN)


def _add_residual_unit(unit: WeightBuilder, width: int) -> None:
    _add_snake(unit, "act1", width)
    unit.conv("conv1.conv", (width, width, 7), 0.5)
    _add_snake(unit, "act2", width)
    unit.conv("conv2.conv", (width, width, 1), 0.5)


def _add_snake(weights: WeightBuilder, name: str, width: int) -> None:
    for parameter in ("alpha", "beta"):
        weights.fill(f"{name}.{parameter}", (width,), 0.0)


def _add_transposed(
    weights: WeightBuilder, name: str, widths: tuple[int, int], kernel: int, stride: int
) -> None:
    """Add a transposed convolution; ``kernel / stride`` inputs meet in an output."""
    std = 1 / math.sqrt(widths[0] * kernel / stride)
    weights.normal(f"{name}.conv.weight", (*widths, kernel), std)
    weights.fill(f"{name}.conv.bias", widths[1:], 0.0)


def _add_conv(
    weights: WeightBuilder, name: str, shape: tuple[int, int, int], gain: float = 1.0
) -> None:
    weights.centred(f"{name}.weight", shape, gain)
    weights.fill(f"{name}.bias", shape[:1], 0.0)
