"""What can be asked of a test checkpoint."""

from dataclasses import dataclass

from vllm_tts_cache.testing.encoder_size import EncoderSize, check_encoder_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """Equal options give byte-identical files.

    Attributes:
        encoders: ``real`` gives the codec its released sizes (a ``codec.pth`` of
            1.5 GB), so that encoding a reference costs what it does in production;
            the language model stays tiny.
        seed: Of all weights.

    Raises:
        ConfigError: A value cannot be used.
    """

    encoders: EncoderSize = "tiny"
    seed: int = 0

    def __post_init__(self) -> None:
        check_encoder_size(self.encoders)
