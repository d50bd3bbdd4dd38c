"""The DAC in its released structure, and in smaller sizes for tests."""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from vllm_omni.model_executor.models.fish_speech.dac_modules import (
    DAC,
    DownsampleResidualVectorQuantize,
    ModelArgs,
    WindowLimitedTransformer,
)
from vllm_omni.model_executor.models.fish_speech.dac_utils import (
    DAC_HOP_LENGTH,
    DAC_NUM_CODEBOOKS,
    DAC_SAMPLE_RATE,
    build_dac_codec,
)

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.speaker.checkpoint_dir import read_json

SAMPLE_RATE_HZ = DAC_SAMPLE_RATE
SAMPLES_PER_FRAME = DAC_HOP_LENGTH
NUM_CODEBOOKS = DAC_NUM_CODEBOOKS

_HEAD_DIM = 64
_ATTENTION: dict[str, Any] = {
    "n_local_heads": -1,  # as many as heads
    "head_dim": _HEAD_DIM,
    "rope_base": 10_000,
    "norm_eps": 1e-5,
    "dropout_rate": 0.0,
    "attn_dropout_rate": 0.0,
    "channels_first": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSizes:
    """Widths and depths; the defaults are the released ones.

    Attributes:
        encoder_dim: Width of the first convolution, a multiple of 4; the latents are
            16 times as wide.
        decoder_dim: Width of the decoder's first convolution, a multiple of 16.
        quantizer_layers: Of each transformer around the quantizer.
        encoder_layers: Of the transformer that ends the encoder.
    """

    encoder_dim: int = 64
    decoder_dim: int = 1536
    quantizer_layers: int = 8
    encoder_layers: int = 4


RELEASED = CodecSizes()


def read_sizes(model_dir: Path) -> CodecSizes:
    """What ``codec.json`` says; without it, as for any released model, its sizes.

    Raises:
        CheckpointError: The file cannot be read, or says something else.
    """
    path = model_dir / "codec.json"
    if not path.exists():
        return RELEASED
    given = read_json(path)
    units = {"encoder_dim": 4, "decoder_dim": 16}
    names = [field.name for field in fields(CodecSizes)]
    if set(given) - set(names) or not all(
        type(size) is int and size > 0 and size % units.get(name, 1) == 0
        for name, size in given.items()
    ):
        raise CheckpointError(
            str(path),
            f"expected positive integers under {', '.join(names)}; the first a "
            "multiple of 4, the second of 16",
        )
    return CodecSizes(**given)


def build_codec(sizes: CodecSizes) -> DAC:
    """The whole codec, encoder and decoder, its weights not yet loaded."""
    if sizes != RELEASED:
        return build_sized_codec(sizes)
    codec = build_dac_codec()
    assert isinstance(codec, DAC)  # the host's annotation says less
    return codec


def build_sized_codec(sizes: CodecSizes) -> DAC:
    """The codec with the released structure, rates, windows and codebooks."""
    return DAC(
        encoder_dim=sizes.encoder_dim,
        encoder_rates=[2, 4, 8, 8],
        decoder_dim=sizes.decoder_dim,
        decoder_rates=[8, 8, 4, 2],
        quantizer=_quantizer(sizes),
        sample_rate=SAMPLE_RATE_HZ,
        causal=True,
        encoder_transformer_layers=[0, 0, 0, sizes.encoder_layers],
        decoder_transformer_layers=[4, 0, 0, 0],
        transformer_general_config=partial(ModelArgs, block_size=16_384, **_ATTENTION),
    )


def _quantizer(sizes: CodecSizes) -> DownsampleResidualVectorQuantize:
    width = 16 * sizes.encoder_dim
    attention = ModelArgs(
        block_size=4_096,
        n_layer=sizes.quantizer_layers,
        n_head=width // _HEAD_DIM,
        dim=width,
        intermediate_size=3 * width,
        **_ATTENTION,
    )

    def transformer() -> WindowLimitedTransformer:
        return WindowLimitedTransformer(
            causal=True, window_size=128, input_dim=width, config=attention
        )

    return DownsampleResidualVectorQuantize(
        input_dim=width,
        n_codebooks=NUM_CODEBOOKS - 1,
        codebook_size=1_024,
        codebook_dim=8,
        quantizer_dropout=0.0,
        downsample_factor=(2, 2),  # pyright: ignore[reportArgumentType]
        post_module=transformer(),
        pre_module=transformer(),
        semantic_codebook_size=4_096,
    )
