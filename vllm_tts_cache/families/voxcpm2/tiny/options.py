"""What can be asked of a test checkpoint."""

from dataclasses import dataclass

from vllm_tts_cache.testing.encoder_size import EncoderSize, check_encoder_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """Equal options give byte-identical files.

    Attributes:
        encoders: ``real`` gives the AudioVAE's encoder its released size (48.4 million
            weights), so that encoding a reference costs what it does in production;
            all else stays tiny.
        seed: Of all weights.

    Raises:
        ConfigError: A value cannot be used.
    """

    encoders: EncoderSize = "tiny"
    seed: int = 0

    def __post_init__(self) -> None:
        check_encoder_size(self.encoders)
