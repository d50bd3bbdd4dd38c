"""How loud each part speaks: the one difference between sensitive and plain weights."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """Gains of random projections, found by measuring; 1 keeps the variance.

    Attributes:
        attention_sharpness: Weight of the query and key norms. Diffuse attention
            dilutes the one position that holds the speaker among hundreds.
        talker_layers: Of every projection in the talker's layers.
        speaker_encoder: Of the hidden layers; sqrt(2) carries a signal through
            rectifiers undamped.
        speaker_embedding: Of the last layer, on pooled features.
        codec_layer_scale: How much a layer of the codec encoder's transformer adds;
            0.01 is what a released one starts its training from, and hides any
            difference in attention.
        cluster_usage: Bounds of the logarithm of a codebook entry's usage, which
            every reader has to divide by.
        normed_text_over: Mean, measured, of channel 0 behind the talker's last norm
            once the text is over; scales the logit of the end of speech.
    """

    attention_sharpness: float
    talker_layers: float
    speaker_encoder: float
    speaker_embedding: float
    codec_layer_scale: float
    cluster_usage: tuple[float, float]
    normed_text_over: float


SENSITIVE = Gains(
    attention_sharpness=2.0,
    talker_layers=1.5,
    speaker_encoder=2**0.5,
    speaker_embedding=0.5,
    codec_layer_scale=0.3,
    cluster_usage=(-2.0, 6.0),
    normed_text_over=0.265,
)
PLAIN = Gains(
    attention_sharpness=1.0,
    talker_layers=0.5,
    speaker_encoder=0.5,
    speaker_embedding=0.5,
    codec_layer_scale=0.01,
    cluster_usage=(0.0, 0.0),
    normed_text_over=1.455,
)
