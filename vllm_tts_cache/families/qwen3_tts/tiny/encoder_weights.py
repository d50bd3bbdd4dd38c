"""Weights of the speaker encoder (ECAPA-TDNN) and of the 12 Hz codec, in float32."""

import math
import re
from collections.abc import Sequence

from torch import Tensor

from vllm_tts_cache.families.qwen3_tts.tiny import sizes
from vllm_tts_cache.families.qwen3_tts.tiny.configs import Json
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


def add_speaker_encoder(weights: WeightBuilder, config: Json) -> None:
    """Add everything below ``speaker_encoder.``; Qwen2.5-Omni has the same network."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
        Qwen2_5OmniDiTConfig,
    )
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        ECAPA_TimeDelayNet,
    )

    shapes = parts.shapes_of(ECAPA_TimeDelayNet, Qwen2_5OmniDiTConfig(**config))
    parts.add_all(weights.under("speaker_encoder"), shapes, _SPEAKER_RULES)


def add_codec_encoder(weights: WeightBuilder, config: Json) -> None:
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


def add_codec_decoder(weights: WeightBuilder, config: Json) -> None:
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
    _add_quantizer(decoder.under("quantizer.rvq_rest"), inputs, sizes.NUM_CODEBOOKS - 1)
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
        codebook.fill("cluster_usage", (sizes.CODEBOOK_SIZE,), 1.0)
        codebook.normal("embedding_sum", (sizes.CODEBOOK_SIZE, dim), 1.0)


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
