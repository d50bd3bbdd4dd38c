"""What can be asked of a test checkpoint, and the widths and depths that it has."""

from dataclasses import dataclass

from vllm_tts_cache.testing.tiny_checkpoint import (
    EncoderSize,
    TransformerSizes,
    check_encoder_size,
)

# As released: they decide what is stored of a reference.
NUM_CODEBOOKS = 8
AUDIO_VOCAB_SIZE = 1025
MASK_ID = 1024

LM = TransformerSizes(
    hidden=64, intermediate=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32
)
# Codes are looked up among the texts' ids as well, before they are left out.
VOCAB_SIZE = 1088
MAX_POSITIONS = 4_096
# Of 32: what is spoken is noise after any number of them.
NUM_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """Equal options give byte-identical files.

    Attributes:
        encoders: ``real`` gives the audio tokenizer's encode side its released size, so
            that encoding a reference costs what it does in production; all else stays
            tiny.
        seed: Of all weights.

    Raises:
        ConfigError: A value cannot be used.
    """

    encoders: EncoderSize = "tiny"
    seed: int = 0

    def __post_init__(self) -> None:
        check_encoder_size(self.encoders)
