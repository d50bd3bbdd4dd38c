"""Weights of the DAC, in float32 and in the spelling that the released file has."""

from vllm_tts_cache.families.fish_speech.tiny import configs
from vllm_tts_cache.families.fish_speech.tiny.configs import CodecSizes
from vllm_tts_cache.families.networks.dac.tiny import DacParts
from vllm_tts_cache.testing.tiny_parts import WeightBuilder, add_convnext

# As at the start of a training, 0.01, a layer would add next to nothing.
_LAYER_SCALE = 0.3
# A code takes away about as much as is left, so every codebook has work to do.
_CODE_GAIN = 0.5
# The output goes through a tanh; at this gain it hardly bends.
_OUTPUT_GAIN = 0.03
_PARTS = DacParts(
    conv=".conv",
    direction="parametrizations.weight.original1",
    norm="parametrizations.weight.original0",
)


def add_codec(weights: WeightBuilder, size: CodecSizes) -> None:
    """Add the whole codec."""
    _add_encoder(weights.under("encoder.block"), size)
    _add_quantizer(weights.under("quantizer"), size)
    decoder, width = weights.under("decoder.model"), size.decoder_dim
    _PARTS.add_conv(decoder, "0", (width, size.latent_dim, 7))
    rates = configs.DECODER_RATES
    _PARTS.add_up(decoder, width, rates, first=1, output_gain=_OUTPUT_GAIN)


def _add_encoder(encoder: WeightBuilder, size: CodecSizes) -> None:
    """From samples to latents."""
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
    """A convolution by a factor of 2, of whose taps so many meet in an output."""
    stage.normal("0.conv.weight", (width, width, 2), (width * num_taps) ** -0.5)
    stage.fill("0.conv.bias", (width,), 0.0)
    add_convnext(stage.under("1"), width, _LAYER_SCALE)


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
    """Layers and the last norm."""
    heads = width // configs.HEAD_DIM_IN_CODEC * configs.HEAD_DIM_IN_CODEC
    shapes = {
        "attention.wqkv": (3 * heads, width),
        "attention.wo": (width, heads),
        "feed_forward.w1": (3 * width, width),
        "feed_forward.w2": (width, 3 * width),
        "feed_forward.w3": (3 * width, width),
    }
    for index in range(num_layers):
        layer = model.under(f"layers.{index}")
        for name, shape in shapes.items():
            layer.projection(f"{name}.weight", shape)
        for norm in ("attention_norm", "ffn_norm"):
            layer.fill(f"{norm}.weight", (width,), 1.0)
        for scale in ("attention_layer_scale", "ffn_layer_scale"):
            layer.fill(f"{scale}.gamma", (width,), _LAYER_SCALE)
    model.fill("norm.weight", (width,), 1.0)
