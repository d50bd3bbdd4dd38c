"""The widths and depths of a test checkpoint."""

from dataclasses import dataclass

from vllm_tts_cache.testing.tiny_checkpoint import EncoderSize, TransformerSizes

# Fixed by the released model, whatever the size of the networks. The host compares
# generated ids with some of the text ids as numbers, so all of them stay.
VOCAB_SIZE = 155_776
NUM_CODEBOOKS = 10
SEMANTIC_CODEBOOK_SIZE = 4_096
RESIDUAL_CODEBOOK_SIZE = 1_024
CODEBOOK_DIM = 8
HEAD_DIM_IN_CODEC = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSizes:
    """The DAC; ``codec.json`` has these names.

    Attributes:
        encoder_dim: Width of the first convolution; the latents are 16 times as wide.
        decoder_dim: Width of the decoder's first convolution, a multiple of 16.
        quantizer_layers: Of each transformer around the quantizer.
        encoder_layers: Of the transformer that ends the encoder.
    """

    encoder_dim: int
    decoder_dim: int
    quantizer_layers: int
    encoder_layers: int
    encoder_rates: tuple[int, int, int, int] = (2, 4, 8, 8)
    decoder_rates: tuple[int, int, int, int] = (8, 8, 4, 2)

    @property
    def latent_dim(self) -> int:
        """Width of the latents that are quantized."""
        return self.encoder_dim * 16


SLOW_AR = TransformerSizes(
    hidden=256, intermediate=768, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64
)
FAST_AR = TransformerSizes(
    hidden=256, intermediate=768, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64
)
CODEC: dict[EncoderSize, CodecSizes] = {
    "tiny": CodecSizes(
        encoder_dim=8, decoder_dim=96, quantizer_layers=1, encoder_layers=1
    ),
    "real": CodecSizes(
        encoder_dim=64, decoder_dim=1536, quantizer_layers=8, encoder_layers=4
    ),
}
