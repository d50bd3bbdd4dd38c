"""The widths and depths of a test checkpoint."""

from vllm_tts_cache.testing.tiny_checkpoint import EncoderSize, TransformerSizes

# As released: they decide how many positions a reference takes, and what is stored.
PATCH_SIZE = 4
LATENT_DIM = 64
ENCODER_RATES = (2, 5, 8, 8)
DECODER_RATES = (8, 6, 5, 2, 2, 2)
# Upper bounds of what the decoder takes for one sample rate.
RATE_BOUNDARIES_HZ = (20_000, 30_000, 40_000)

_HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
LM = TransformerSizes(hidden=128, intermediate=256, num_layers=2, **_HEADS)
RESIDUAL_LM = TransformerSizes(hidden=128, intermediate=256, num_layers=1, **_HEADS)
FEATURE_ENCODER = TransformerSizes(hidden=64, intermediate=128, num_layers=1, **_HEADS)
DIT = TransformerSizes(hidden=64, intermediate=128, num_layers=1, **_HEADS)

QUANTIZER_DIM = 32
QUANTIZER_SCALE = 9
MAX_POSITIONS = 4_096

# Width of the first convolution; every stage doubles it.
ENCODER_DIM: dict[EncoderSize, int] = {"tiny": 8, "real": 128}
# Every stage halves it; there are six.
DECODER_DIM = 128
