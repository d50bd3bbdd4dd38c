"""The widths and depths of a test checkpoint."""

from dataclasses import dataclass

from vllm_tts_cache.testing.tiny_checkpoint import EncoderSize, TransformerSizes

# As released: they decide what is stored, and what the talker's ids mean.
NUM_CODES = 6_561
NUM_TALKER_IDS = NUM_CODES + 200
NUM_MELS = 80
SPEAKER_SIZE = 192
TOKENIZER_MELS = 128
NUM_DIGITS = 8  # of a code, each 0, 1 or 2

TALKER = TransformerSizes(
    hidden=128, intermediate=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32
)
# More than the text tokenizer's ids with the host's marks, and more than the codes:
# stock looks up running requests' codes here as well when another request begins.
TEXT_VOCAB_SIZE = 8_192
MAX_POSITIONS = 4_096

LOOKAHEAD_CHANNELS = 32
DIT_WIDTH, DIT_DEPTH, DIT_HEADS, DIT_HEAD_SIZE = 64, 2, 4, 16
VOCODER_CHANNELS = 32
PITCH_CHANNELS = 32


@dataclass(frozen=True, slots=True)
class NetworkSizes:
    """Sizes of a stand-in for one of the ONNX files.

    Attributes:
        width: Width of its layers.
        inner: Width in the middle of each block.
        num_blocks: Number of residual blocks.
    """

    width: int
    inner: int
    num_blocks: int


# The released tokenizer has 242 million weights, and the speaker network 7 million.
TOKENIZER: dict[EncoderSize, NetworkSizes] = {
    "tiny": NetworkSizes(width=32, inner=64, num_blocks=1),
    "real": NetworkSizes(width=1_280, inner=7_680, num_blocks=12),
}
SPEAKER: dict[EncoderSize, NetworkSizes] = {
    "tiny": NetworkSizes(width=32, inner=64, num_blocks=1),
    "real": NetworkSizes(width=512, inner=1_536, num_blocks=4),
}
