"""Reference audio from bytes: decoded, downmixed, measured and checked.

Pure and safe in any thread; it takes up to a second of CPU, so keep it off an event
loop. Nothing is trimmed, normalised or resampled: the official packages encode what
the decoder gives, downmixed by the mean over channels in float32.
"""

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_tts_cache.audio.containers import PcmBlock, read_blocks
from vllm_tts_cache.audio.limits import (
    DEFAULT_LIMITS,
    FULL_SCALE,
    AudioLimits,
    AudioWarning,
    active_level_dbfs,
    check_level,
    clipped_share,
)
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import InvalidAudioError

# Browsers call an .mp4 or a .webm video even when it holds only sound.
_DATA_URL = re.compile(r"data:(?:audio|video)/[^,;\s]+(?:;[^,;]+)*;base64", re.I)
_DATA_URL_HEAD_CHARS = 256


@dataclass(frozen=True, slots=True, eq=False)
class DecodedAudio:
    """A usable reference audio and what a listener would mind about it.

    Attributes:
        audio: What encoders read.
        warnings: What a listener would mind.
        sources: The file that each clip was decoded from; empty if one never was one.
    """

    audio: ReferenceAudio
    warnings: tuple[AudioWarning, ...]
    sources: tuple[bytes, ...] = ()


def decode(data: bytes, limits: AudioLimits = DEFAULT_LIMITS) -> DecodedAudio:
    """Decode a whole file.

    A truncated file counts as what decodes before its end, within the limits.

    Raises:
        InvalidAudioError: Empty, too large, undecodable, too short, too long, silent,
            not finite, or a rate or channel count out of bounds. What is too long is
            refused after ``max_seconds`` are decoded, whatever its header says.
    """
    limits.check_size(len(data))
    mono, at_full_scale, sample_rate_hz = downmix(read_blocks(data), limits)
    limits.check_not_shorter(mono.size, sample_rate_hz)
    if not np.isfinite(mono).all():
        raise InvalidAudioError("it holds samples that are not finite (NaN, Inf).")
    level = active_level_dbfs(mono, sample_rate_hz)
    warnings = check_level(level, clipped_share(at_full_scale))
    return DecodedAudio(ReferenceAudio.of(mono, sample_rate_hz), warnings, (data,))


def decode_data_url(url: str, limits: AudioLimits = DEFAULT_LIMITS) -> DecodedAudio:
    """Decode ``data:audio/...;base64,...``; its media type is not believed.

    Raises:
        InvalidAudioError: As for :func:`decode`, or not a base64 data URL.
    """
    comma = url.find(",", 0, _DATA_URL_HEAD_CHARS)
    if comma < 0 or not _DATA_URL.fullmatch(url, 0, comma):
        raise InvalidAudioError("expected data:audio/...;base64,... as its URL.")
    # Four characters hold three bytes; the last two may be padding.
    limits.check_size(max(0, (len(url) - comma - 1) // 4 * 3 - 2))
    try:
        data = base64.b64decode(url[comma + 1 :], validate=True)
    except ValueError as exc:
        raise InvalidAudioError(f"its base64 is not valid ({exc}).") from exc
    return decode(data, limits)


def decode_path(path: Path, limits: AudioLimits = DEFAULT_LIMITS) -> DecodedAudio:
    """Decode a file that the operator names; never pass what a client sent.

    Raises:
        InvalidAudioError: As for :func:`decode`, or the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            # One byte more, so that a too large file, or a pipe without end, shows.
            data = file.read(limits.max_bytes + 1)
    except OSError as exc:
        raise InvalidAudioError(f"{path}: {exc.strerror or exc}.") from exc
    return decode(data, limits)


def downmix(
    blocks: Iterator[PcmBlock], limits: AudioLimits
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_], int]:
    """Mean over channels, block by block, until the end or one block past the limit.

    Returns:
        ``(num_samples,)`` float32; whether any channel was at full scale, of the same
        shape; the rate in Hz.

    Raises:
        InvalidAudioError: No samples, too many, or a format out of bounds.
    """
    mono: list[npt.NDArray[np.float32]] = []
    at_full_scale: list[npt.NDArray[np.bool_]] = []
    pcm_format, num_samples = None, 0
    for block in blocks:
        found = block.sample_rate_hz, block.samples.shape[1]
        if found != pcm_format:
            if pcm_format is not None:
                raise InvalidAudioError("its rate or channel count changes midway.")
            limits.check_format(*found)
            pcm_format = found
        num_samples += len(block.samples)
        limits.check_not_longer(num_samples, block.sample_rate_hz)
        # Finite samples may add up to Inf, which is refused later by its name.
        with np.errstate(over="ignore", invalid="ignore"):
            mono.append(np.mean(block.samples, axis=-1))
            at_full_scale.append(np.max(np.abs(block.samples), axis=-1) >= FULL_SCALE)
    if pcm_format is None:
        raise InvalidAudioError("it holds no samples.")
    return np.concatenate(mono), np.concatenate(at_full_scale), pcm_format[0]
