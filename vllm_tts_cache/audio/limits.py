"""What a reference audio may measure."""

from dataclasses import dataclass

from vllm_tts_cache.errors import InvalidAudioError


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioLimits:
    """Bounds on a reference audio; each check raises ``InvalidAudioError``.

    Attributes:
        max_bytes: Size of the file, before anything is decoded.
        max_channels: Beyond third-order ambisonics it is no recording of a voice,
            and a few bytes of a codec can stand for hundreds of silent channels.
    """

    min_seconds: float = 1.0
    max_seconds: float = 30.0
    max_bytes: int = 10 * 1024 * 1024
    min_rate_hz: int = 8_000
    max_rate_hz: int = 192_000
    max_channels: int = 16

    def check_size(self, num_bytes: int) -> None:
        """Refuse an empty or too large file."""
        if num_bytes == 0:
            raise InvalidAudioError("it is empty.")
        if num_bytes > self.max_bytes:
            raise InvalidAudioError(
                f"it has {num_bytes / 1024**2:.1f} MB; at most "
                f"{self.max_bytes / 1024**2:g} MB are allowed."
            )

    def check_format(self, sample_rate_hz: int, num_channels: int) -> None:
        """Refuse a sample rate or a channel count out of bounds."""
        if not self.min_rate_hz <= sample_rate_hz <= self.max_rate_hz:
            raise InvalidAudioError(
                f"its sample rate is {sample_rate_hz} Hz; allowed are "
                f"{self.min_rate_hz} to {self.max_rate_hz} Hz."
            )
        if num_channels > self.max_channels:
            raise InvalidAudioError(
                f"it has {num_channels} channels; at most {self.max_channels} are "
                "allowed."
            )

    def check_not_longer(self, num_samples: int, sample_rate_hz: int) -> None:
        """Refuse what is already too long, however much may follow."""
        if num_samples > self.max_seconds * sample_rate_hz:
            raise InvalidAudioError(
                f"it is longer than {self.max_seconds:g} s, which is the most."
            )

    def check_not_shorter(self, num_samples: int, sample_rate_hz: int) -> None:
        """Refuse what is too short, once all of it is known."""
        if num_samples < self.min_seconds * sample_rate_hz:
            raise InvalidAudioError(
                f"it lasts {num_samples / sample_rate_hz:.2f} s; at least "
                f"{self.min_seconds:g} s are needed."
            )


DEFAULT_LIMITS = AudioLimits()
