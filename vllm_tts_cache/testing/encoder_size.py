"""How large the reference encoders of a test checkpoint are."""

from typing import Literal, get_args

from vllm_tts_cache.errors import ConfigError

EncoderSize = Literal["tiny", "real"]
ENCODER_SIZES: tuple[str, ...] = get_args(EncoderSize)


def check_encoder_size(encoders: str) -> None:
    """Raises: ConfigError if it is none of ``ENCODER_SIZES``."""
    if encoders not in ENCODER_SIZES:
        raise ConfigError(f"encoders={encoders!r}: choose from {ENCODER_SIZES}")
