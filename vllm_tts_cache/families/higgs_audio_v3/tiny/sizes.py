"""The widths and depths of a test checkpoint."""

from vllm_tts_cache.testing.tiny_checkpoint import TransformerSizes

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
