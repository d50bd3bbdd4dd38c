"""The widths and depths of a test checkpoint."""

from vllm_tts_cache.testing.tiny_checkpoint import TransformerSizes

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
