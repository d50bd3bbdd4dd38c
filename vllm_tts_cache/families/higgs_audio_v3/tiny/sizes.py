"""What can be asked of a test checkpoint, and the widths and depths that it has."""

from dataclasses import dataclass

from vllm_tts_cache.testing.tiny_checkpoint import (
    EncoderSize,
    TransformerSizes,
    check_encoder_size,
)

# As released. The host's pipeline stops at some of the ids, so all of them stay.
VOCAB_SIZE = 151_936
NUM_CODEBOOKS = 8
# The two that begin and end a codebook's frames are among them.
CODEBOOK_SIZE = 1_026
# The host knows the released decoder only.
DECODER_DIM = 1_024

TALKER = TransformerSizes(
    hidden=128, intermediate=384, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """Equal options give byte-identical files.

    Attributes:
        encoders: ``real`` gives the tokenizer's encode side its released size, so that
            encoding a reference costs what it does in production; the talker stays
            tiny.
        seed: Of all weights.

    Raises:
        ConfigError: A value cannot be used.
    """

    encoders: EncoderSize = "tiny"
    seed: int = 0

    def __post_init__(self) -> None:
        check_encoder_size(self.encoders)
