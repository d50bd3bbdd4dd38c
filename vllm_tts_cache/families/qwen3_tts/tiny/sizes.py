"""Options of a test checkpoint, and its widths and depths."""

import math
from dataclasses import dataclass
from typing import Any

from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.testing.tiny_checkpoint import (
    EncoderOptions,
    EncoderSize,
    TransformerSizes,
)

# Fixed by the released models, whatever the size of the networks.
SAMPLE_RATE_HZ = 24_000
SAMPLES_PER_FRAME = 1_920
NUM_CODEBOOKS = 16
CODEBOOK_SIZE = 2_048
TALKER_VOCAB_SIZE = 3_072
NUM_MEL_BINS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecEncoderSizes:
    """Mimi's encoder: convolutions, a transformer, a residual quantizer."""

    transformer: TransformerSizes
    num_filters: int
    codebook_dim: int
    num_quantizers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecDecoderSizes:
    """The 12 Hz codec's causal decoder."""

    transformer: TransformerSizes
    codebook_dim: int
    latent_dim: int
    decoder_dim: int


TALKER = TransformerSizes(
    hidden=128, intermediate=256, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64
)
CODE_PREDICTOR = TransformerSizes(
    hidden=128, intermediate=256, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64
)
TEXT_HIDDEN = 64

_TINY = TransformerSizes(
    hidden=64, intermediate=128, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32
)
_REAL_DECODER = TransformerSizes(
    hidden=1024,
    intermediate=3072,
    num_layers=8,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
)
_REAL_ENCODER = TransformerSizes(
    hidden=512,
    intermediate=2048,
    num_layers=8,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
)

CODEC_DECODER = {
    "tiny": CodecDecoderSizes(
        transformer=_TINY, codebook_dim=64, latent_dim=64, decoder_dim=64
    ),
    "real": CodecDecoderSizes(
        transformer=_REAL_DECODER, codebook_dim=512, latent_dim=1024, decoder_dim=1536
    ),
}

# ECAPA-TDNN; the last of ``enc_channels`` is the aggregation's.
SPEAKER_ENCODER: dict[EncoderSize, dict[str, Any]] = {
    "tiny": {
        "enc_channels": [32, 32, 32, 32, 96],
        "enc_attention_channels": 16,
        "enc_se_channels": 16,
    },
    "real": {
        "enc_channels": [512, 512, 512, 512, 1536],
        "enc_attention_channels": 128,
        "enc_se_channels": 128,
    },
}

CODEC_ENCODER: dict[EncoderSize, CodecEncoderSizes] = {
    "tiny": CodecEncoderSizes(
        transformer=_TINY, num_filters=4, codebook_dim=32, num_quantizers=NUM_CODEBOOKS
    ),
    "real": CodecEncoderSizes(
        transformer=_REAL_ENCODER,
        num_filters=64,
        codebook_dim=256,
        # The released encoder has 32 codebooks, of which the first 16 are used.
        num_quantizers=32,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions(EncoderOptions):
    """Equal options give byte-identical files.

    With ``real`` encoders the 12 Hz codec encoder and the speaker encoder have their
    released sizes, so that encoding a reference costs what it does in production; the
    talker stays tiny.

    Attributes:
        real_decoder: Gives the codec's decoder its released size, so that speaking
            costs what it does in production after the talker.
        eos_logit: Mean logit of the end of speech once the text is over. The other
            codes have a standard deviation of 1, so at temperature 0.9 and top-k 50
            the default ends about 7 % of the frames.

    Raises: ConfigError if a value cannot be used.
    """

    real_decoder: bool = False
    eos_logit: float = 3.6

    @property
    def decoder(self) -> CodecDecoderSizes:
        """Sizes of the 12 Hz codec's decoder."""
        return CODEC_DECODER["real" if self.real_decoder else "tiny"]

    def __post_init__(self) -> None:
        if not math.isfinite(self.eos_logit):
            raise ConfigError(f"eos_logit={self.eos_logit}: must be a finite number")
