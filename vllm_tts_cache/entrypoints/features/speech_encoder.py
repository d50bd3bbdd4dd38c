"""Encodes speech while it is made, in the formats that clients ask for; by FFmpeg."""

import threading
from dataclasses import dataclass, field
from typing import Any

import av
import numpy as np

OPUS_RATES_HZ = (8_000, 12_000, 16_000, 24_000, 48_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioFormat:
    """A format that can be written without going back to its beginning.

    Attributes:
        container: FFmpeg's name of it.
        codec: FFmpeg's name of the encoder.
        media_type: Of an answer in this format.
        bits_per_second: Of the encoder; None for one without loss.
        options: Of the container.
    """

    container: str
    codec: str
    media_type: str
    bits_per_second: int | None = None
    options: dict[str, str] = field(default_factory=dict)


FORMATS = {
    # Without the frame that says how long the file is, which is written at the end.
    "mp3": AudioFormat(
        container="mp3",
        codec="libmp3lame",
        media_type="audio/mpeg",
        bits_per_second=128_000,
        options={"write_xing": "0", "id3v2_version": "0"},
    ),
    # A page of 20 ms; by default the first one comes after a second of speech. And with
    # a number of the stream that is not random: the same speech is the same file.
    "opus": AudioFormat(
        container="ogg",
        codec="libopus",
        media_type="audio/ogg",
        bits_per_second=64_000,
        options={"page_duration": "20000", "fflags": "+bitexact"},
    ),
    "aac": AudioFormat(
        container="adts", codec="aac", media_type="audio/aac", bits_per_second=96_000
    ),
    "flac": AudioFormat(container="flac", codec="flac", media_type="audio/flac"),
}


class _Written:
    """A file that can only be written to, and gives what was written since."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def taken(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


class SpeechEncoder:
    """Takes PCM of one speech piece by piece, and gives bytes as they are complete.

    Args:
        format_name: One of `FORMATS`.
        sample_rate_hz: Of the PCM, which has one channel of 16-bit integers; for Opus
            one of `OPUS_RATES_HZ`.
    """

    def __init__(self, format_name: str, sample_rate_hz: int):
        wanted = FORMATS[format_name]
        self._rate_hz = sample_rate_hz
        self._lock = threading.Lock()
        self._written = _Written()
        self._container = av.open(
            self._written, "w", format=wanted.container, options=wanted.options
        )
        self._stream: Any = self._container.add_stream(
            wanted.codec, rate=sample_rate_hz, layout="mono"
        )
        if wanted.bits_per_second is not None:
            self._stream.bit_rate = wanted.bits_per_second
        self._num_samples = 0
        self._odd_byte = b""

    def encode(self, pcm: bytes) -> bytes:
        """Return what is complete with these bytes; it may be nothing yet."""
        with self._lock:
            pcm = self._odd_byte + pcm
            num_even = len(pcm) - len(pcm) % 2
            self._odd_byte = pcm[num_even:]
            samples = np.frombuffer(pcm[:num_even], dtype="<i2")[None]
            if samples.size:
                frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
                frame.sample_rate = self._rate_hz
                frame.pts = self._num_samples
                self._num_samples += samples.size
                self._container.mux(self._stream.encode(frame))
            return self._written.taken()

    def end(self) -> bytes:
        """Return the rest."""
        with self._lock:
            if self._num_samples:  # else FFmpeg has begun nothing that it could end
                self._container.mux(self._stream.encode(None))
            self._container.close()
            return self._written.taken()

    def close(self) -> None:
        """Give back FFmpeg's memory, which Python frees late: up to 7 MiB for FLAC."""
        with self._lock:
            self._container.close()
