"""Sizes of the DAC, by their names in ``codec.json``."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSizes:
    """Widths and depths; the defaults are the released ones.

    Attributes:
        encoder_dim: Width of the first convolution, a multiple of 4.
        decoder_dim: Width of the decoder's first convolution, a multiple of 16.
        quantizer_layers: Layers of each transformer around the quantizer.
        encoder_layers: Layers of the transformer that ends the encoder.
    """

    encoder_dim: int = 64
    decoder_dim: int = 1536
    quantizer_layers: int = 8
    encoder_layers: int = 4

    @property
    def latent_dim(self) -> int:
        """Width of the latents that are quantized."""
        return self.encoder_dim * 16


RELEASED = CodecSizes()
