"""Weights of the DAC, in float32 and in the spelling that the released file has."""

from vllm_tts_cache.families.fish_speech.tiny import sizes
from vllm_tts_cache.families.fish_speech.tiny.codec_parts import (
    LAYER_SCALE,
    add_conv,
    add_residual_units,
    add_snake,
    add_transformer,
    add_transposed_conv,
)
from vllm_tts_cache.families.fish_speech.tiny.sizes import CodecSizes
from vllm_tts_cache.testing.tiny_parts import WeightBuilder, add_convnext

# Speech has a standard deviation of about 0.1; the layers behind work at about 1.
_INPUT_GAIN = 10.0
# A code takes away about as much as is left, so every codebook has work to do.
_CODE_GAIN = 0.5
# The output goes through a tanh; at this gain it hardly bends.
_OUTPUT_GAIN = 0.03


def add_codec(weights: WeightBuilder, size: CodecSizes) -> None:
    """Add the whole codec."""
    _add_encoder(weights.under("encoder.block"), size)
    _add_quantizer(weights.under("quantizer"), size)
    _add_decoder(weights.under("decoder.model"), size)


def _add_encoder(encoder: WeightBuilder, size: CodecSizes) -> None:
    """From samples to latents: each stage downsamples and doubles the width."""
    width, last = size.encoder_dim, len(size.encoder_rates)
    add_conv(encoder, "0", (width, 1, 7), _INPUT_GAIN)
    for index, rate in enumerate(size.encoder_rates, start=1):
        stage = encoder.under(f"{index}.block")
        add_residual_units(stage, 0, width)
        add_snake(stage, "3", width)
        add_conv(stage, "4", (2 * width, width, 2 * rate))
        width *= 2
    add_transformer(encoder.under(f"{last}.block.5"), width, size.encoder_layers)
    add_snake(encoder, str(last + 1), width)
    add_conv(encoder, str(last + 2), (size.latent_dim, width, 3))


def _add_quantizer(quantizer: WeightBuilder, size: CodecSizes) -> None:
    width = size.latent_dim
    for part in ("pre_module", "post_module"):
        add_transformer(quantizer.under(part), width, size.quantizer_layers)
    for index in range(2):
        _add_resampling(quantizer.under(f"downsample.{index}"), width, num_taps=2)
        _add_resampling(quantizer.under(f"upsample.{index}"), width, num_taps=1)
    semantic = quantizer.under("semantic_quantizer.quantizers.0")
    _add_codebook(semantic, width, sizes.SEMANTIC_CODEBOOK_SIZE)
    for book in range(sizes.NUM_CODEBOOKS - 1):
        residual = quantizer.under(f"quantizer.quantizers.{book}")
        _add_codebook(residual, width, sizes.RESIDUAL_CODEBOOK_SIZE)


def _add_resampling(stage: WeightBuilder, width: int, *, num_taps: int) -> None:
    """A convolution by a factor of 2, of whose taps so many meet in an output."""
    stage.normal("0.conv.weight", (width, width, 2), (width * num_taps) ** -0.5)
    stage.fill("0.conv.bias", (width,), 0.0)
    add_convnext(stage.under("1"), width, LAYER_SCALE)


def _add_codebook(book: WeightBuilder, width: int, num_codes: int) -> None:
    for name, outputs, inputs, gain in (
        ("in_proj", sizes.CODEBOOK_DIM, width, 1.0),
        ("out_proj", width, sizes.CODEBOOK_DIM, _CODE_GAIN),
    ):
        projection = book.under(name)
        projection.normal("weight_v", (outputs, inputs, 1), 1.0)
        projection.fill("weight_g", (outputs, 1, 1), gain)
        projection.fill("bias", (outputs,), 0.0)
    book.normal("codebook.weight", (num_codes, sizes.CODEBOOK_DIM), 1.0)


def _add_decoder(decoder: WeightBuilder, size: CodecSizes) -> None:
    """From latents to samples: each stage upsamples and halves the width."""
    width, last = size.decoder_dim, len(size.decoder_rates)
    add_conv(decoder, "0", (width, size.latent_dim, 7))
    for index, rate in enumerate(size.decoder_rates, start=1):
        stage = decoder.under(f"{index}.block")
        add_snake(stage, "0", width)
        add_transposed_conv(stage, "1", (width, width // 2), rate)
        width //= 2
        add_residual_units(stage, 2, width)
    add_snake(decoder, str(last + 1), width)
    add_conv(decoder, str(last + 2), (1, width, 7), _OUTPUT_GAIN)
