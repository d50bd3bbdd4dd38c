"""Bounds of a reference audio, and its level: silent, low, or clipped.

The *active level* is the RMS that at least 0.2 s of the clip reach: of frames of 20 ms,
each without its mean, the tenth loudest. So a constant offset is silence, and so are a
few clicks; a short word in a long pause is not.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tts_cache.errors import InvalidAudioError

SILENCE_DBFS = -60.0
LOW_LEVEL_DBFS = -40.0
# The largest 16-bit sample is 0.99997; a sine that only touches full scale stays
# above this for fewer than three samples at the usual rates.
FULL_SCALE = 0.9999
MAX_CLIPPED_SHARE = 1e-3

_FRAMES_PER_SECOND = 50
_NUM_ACTIVE_FRAMES = 10  # 0.2 s
_FLOOR_POWER = 1e-20  # -200 dBFS stands for digital silence


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioLimits:
    """Bounds of a reference audio; each check raises ``InvalidAudioError``.

    Attributes:
        max_bytes: Size of the file.
        max_channels: Third-order ambisonics has 16; without a bound a few bytes of a
            codec can stand for hundreds of silent channels.
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
        """Refuse a clip that is too long, whether or not it is decoded to its end."""
        if num_samples > self.max_seconds * sample_rate_hz:
            raise InvalidAudioError(
                f"it is longer than {self.max_seconds:g} s, which is the most."
            )

    def check_not_shorter(self, num_samples: int, sample_rate_hz: int) -> None:
        """Refuse a whole clip that is too short."""
        if num_samples < self.min_seconds * sample_rate_hz:
            raise InvalidAudioError(
                f"it lasts {num_samples / sample_rate_hz:.2f} s; at least "
                f"{self.min_seconds:g} s are needed."
            )


DEFAULT_LIMITS = AudioLimits()


@dataclass(frozen=True, slots=True)
class AudioWarning:
    """What is wrong with a clip, and no reason to refuse it."""

    code: str
    message: str


def active_level_dbfs(samples: npt.NDArray[np.float32], sample_rate_hz: int) -> float:
    """The active level of ``(num_samples,)`` audio, in dB relative to full scale."""
    size = min(samples.size, sample_rate_hz // _FRAMES_PER_SECOND)
    frames = samples[: samples.size // size * size].reshape(-1, size)
    # float64: the square of a large float32 sample overflows.
    power = np.sort(np.var(frames, axis=1, dtype=np.float64))[::-1]
    reached = power[min(power.size, _NUM_ACTIVE_FRAMES) - 1]
    return float(10 * np.log10(max(reached, _FLOOR_POWER)))


def clipped_share(at_full_scale: npt.NDArray[np.bool_]) -> float:
    """Share of samples that begin three in a row at full scale; a peak has fewer."""
    flat = at_full_scale[:-2] & at_full_scale[1:-1] & at_full_scale[2:]
    return float(np.count_nonzero(flat) / max(at_full_scale.size, 1))


def check_level(level_dbfs: float, clipped: float) -> tuple[AudioWarning, ...]:
    """Refuse silence; warn of a low level and of clipping.

    Raises: InvalidAudioError: The active level is below ``SILENCE_DBFS``.
    """
    if level_dbfs < SILENCE_DBFS:
        raise InvalidAudioError(
            f"it is silent: no 0.2 s of it reach {SILENCE_DBFS:g} dBFS (RMS of 20 ms "
            f"frames without their mean); the loudest reach {level_dbfs:.1f} dBFS."
        )
    warnings = []
    if level_dbfs < LOW_LEVEL_DBFS:
        message = f"the loudest 0.2 s reach only {level_dbfs:.1f} dBFS (RMS); record "
        message += f"above {LOW_LEVEL_DBFS:g} dBFS."
        warnings.append(AudioWarning("low_level", message))
    if clipped > MAX_CLIPPED_SHARE:
        message = f"{clipped:.2%} of the samples lie in flat tops at full scale; "
        warnings.append(AudioWarning("clipping", f"{message}record with less gain."))
    return tuple(warnings)
