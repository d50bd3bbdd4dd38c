"""Container formats: which one bytes are in, and its samples, block by block.

libsndfile reads WAV, FLAC, OGG and MP3; FFmpeg the rest. A format is chosen from the
first bytes and then forced, so a playlist or a script that names other files is never
tried. Headers are not believed: no length in one decides what is allocated or when
reading stops.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import av
import av.error
import numpy as np
import numpy.typing as npt
import soundfile
from av.audio.codeccontext import AudioCodecContext
from av.audio.plane import AudioPlane
from av.container import InputContainer

from vllm_tts_cache.audio import mp4
from vllm_tts_cache.errors import InvalidAudioError

ACCEPTED = "WAV, FLAC, OGG (Vorbis, Opus), MP3, MP4/M4A, AAC (ADTS) and WebM"

_BLOCK_SAMPLES = 1 << 17  # over all channels: half a MiB
_SNDFILE_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3", "MPEG")
_FFMPEG_CODECS = frozenset({"aac", "alac", "flac", "mp3", "opus", "vorbis"})
# The decoders for them; no other may run on a stranger's bytes, not even for the look
# that FFmpeg takes at every track when it opens a file.
_FFMPEG_DECODERS = "aac,alac,flac,libopus,libvorbis,mp3,mp3float,opus,vorbis"
# Interleaved sample format -> element type, and what takes it to full scale 1.0.
_SAMPLE_FORMATS = {
    "flt": (np.float32, 1.0),
    "s16": (np.int16, 2.0**-15),
    "s32": (np.int32, 2.0**-31),
}

# libsndfile raises RuntimeErrors, FFmpeg's error numbers come as OSError, EOFError,
# MemoryError or ValueError, and both bindings trip over what a damaged header says.
_DECODER_ERRORS = (
    av.error.FFmpegError,
    soundfile.SoundFileError,
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, eq=False)
class PcmBlock:
    """Decoded samples ``(num_frames, num_channels)``, float32, at least one frame."""

    samples: npt.NDArray[np.float32]
    sample_rate_hz: int


def read_blocks(data: bytes) -> Iterator[PcmBlock]:
    """Decode ``data`` lazily: who stops reading stops the decoding.

    Raises:
        InvalidAudioError: The format is not accepted, or its decoder reports damage.
            A file that merely ends early counts as what decodes before its end.
    """
    container = _sniff(data)
    if container is None:
        raise InvalidAudioError(
            f"its format is not recognised; accepted are {ACCEPTED}."
        )
    with _decoder_errors():
        if container == "sndfile":
            yield from _sndfile_blocks(data)
        else:
            yield from _ffmpeg_blocks(data, container)


def _sniff(data: bytes) -> str | None:
    """``sndfile``, the name of an FFmpeg demuxer, or None."""
    start = _id3_num_bytes(data)
    head = data[start : start + 12]
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "sndfile"
    if head[:4] in (b"fLaC", b"OggS"):
        return "sndfile"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if head[4:8] == b"ftyp":
        return "mov"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        # The two bits after the version name the MPEG layer; ADTS has 0 there.
        return "sndfile" if head[1] & 0x06 else "aac"
    return None


def _id3_num_bytes(data: bytes) -> int:
    if data[:3] != b"ID3" or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:  # seven bits each
        size = size << 7 | byte & 0x7F
    return 10 + size


@contextmanager
def _decoder_errors() -> Iterator[None]:
    try:
        yield
    except _DECODER_ERRORS as exc:
        detail = getattr(exc, "error_string", None) or exc
        if isinstance(exc, av.error.FFmpegError):
            detail = exc.strerror
        raise InvalidAudioError(
            f"it cannot be decoded ({detail}); accepted are {ACCEPTED}."
        ) from exc


class _ClampedBytesIO(io.BytesIO):
    """Seeks before the start go to the start.

    Damaged headers lead there, and an exception inside libsndfile's callback would be
    printed to standard error instead of raised.
    """

    def __init__(self, data: bytes):
        super().__init__(data)
        self._num_bytes = len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_CUR: self.tell(), io.SEEK_END: self._num_bytes}
        return super().seek(max(0, base.get(whence, 0) + offset))


class _SequentialSoundFile(soundfile.SoundFile):
    """Only reads on.

    Where it may seek, soundfile stops at the length that the header claims, and seeks
    after every block: past the end that fails, and a lossy decoder starts anew.
    """

    def seekable(self) -> bool:
        return False


def _sndfile_blocks(data: bytes) -> Iterator[PcmBlock]:
    with _SequentialSoundFile(_ClampedBytesIO(data)) as file:
        if file.format not in _SNDFILE_FORMATS:
            raise InvalidAudioError(
                f"its format is {file.format}; accepted are {ACCEPTED}."
            )
        num_frames = max(1, _BLOCK_SAMPLES // file.channels)
        while True:
            samples = file.read(num_frames, dtype="float32", always_2d=True)
            if not len(samples):
                return
            yield PcmBlock(samples.astype(np.float32, copy=False), file.samplerate)


def _ffmpeg_blocks(data: bytes, container: str) -> Iterator[PcmBlock]:
    if container == "mov":
        mp4.check_index(data)
    with av.open(
        io.BytesIO(data),
        format=container,
        io_open=_refuse_other_files,
        container_options={
            "codec_whitelist": _FFMPEG_DECODERS,
            "format_whitelist": container,
            "protocol_whitelist": "",
        },
        metadata_errors="replace",
    ) as file:
        stream = _audio_stream(file)
        for frame in file.decode(stream):
            if frame.samples:
                yield PcmBlock(_frame_samples(frame), frame.sample_rate)


def _audio_stream(file: InputContainer) -> av.AudioStream:
    """The first audio track, if it is one that we decode."""
    if not file.streams.audio:
        raise InvalidAudioError("it has no audio track.")
    stream = file.streams.audio[0]
    # FFmpeg without a decoder for a track leaves its context out.
    context = cast(AudioCodecContext | None, stream.codec_context)
    codec = context.codec.canonical_name if context else "unknown"
    if codec not in _FFMPEG_CODECS:
        raise InvalidAudioError(
            f"its codec is {codec}; accepted in this container are "
            f"{', '.join(sorted(_FFMPEG_CODECS))}."
        )
    return stream


def _refuse_other_files(url: str, flags: int, options: dict[str, str]) -> None:
    del url, flags, options
    raise InvalidAudioError("it refers to another file.")


def _frame_samples(frame: av.AudioFrame) -> npt.NDArray[np.float32]:
    """``(num_frames, num_channels)`` float32 of a planar or an interleaved frame.

    PyAV's ``frame.planes``, and so its ``to_ndarray``, looks for the last plane behind
    the end of a table of eight, and a 7.1 clip then crashes the process. So each plane
    is taken by its number.
    """
    dtype, scale = _SAMPLE_FORMATS[frame.format.packed.name]
    num_channels, planar = frame.layout.nb_channels, frame.format.is_planar
    count = frame.samples if planar else frame.samples * num_channels
    planes = [
        np.frombuffer(cast(bytes, AudioPlane(frame, index)), dtype, count)
        for index in range(num_channels if planar else 1)
    ]
    rows = np.stack(planes, axis=-1) if planar else planes[0].reshape(-1, num_channels)
    return (rows * scale).astype(np.float32)
