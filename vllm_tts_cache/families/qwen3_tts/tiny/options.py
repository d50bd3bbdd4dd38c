"""What can be asked of a test checkpoint."""

import math
from dataclasses import dataclass, field

from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.testing.encoder_size import EncoderSize, check_encoder_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """Equal options give byte-identical files.

    Attributes:
        sensitive: Weights under which speakers, attention windows and dtypes are
            heard. Without, weights as small as at the start of a training, which
            hide such differences.
        encoders: ``real`` gives the 12 Hz codec encoder and the speaker encoder
            their released sizes, so that encoding a reference costs what it does in
            production; the talker stays tiny.
        seed: Of all weights.
        eos_logit: Mean logit of the end of speech once the text is over. The other
            codes have a standard deviation of 1, so at temperature 0.9 and top-k 50
            the default ends about 7 % of the frames.

    Raises:
        ConfigError: A value cannot be used.
    """

    sensitive: bool = field(
        default=True,
        metadata={
            "help": "weights under which speakers, attention windows and dtypes are "
            "heard"
        },
    )
    encoders: EncoderSize = "tiny"
    seed: int = 0
    eos_logit: float = field(
        default=3.6,
        metadata={
            "help": "mean logit of the end of speech once the text is over; more is "
            "shorter"
        },
    )

    def __post_init__(self) -> None:
        check_encoder_size(self.encoders)
        if not math.isfinite(self.eos_logit):
            raise ConfigError(f"eos_logit={self.eos_logit}: must be a finite number")
