"""Decodes files by FFmpeg, frame by frame, and says how much of a clip is missing.

FFmpeg finds the format of a file by its content and opens only those on our list, so a
playlist or a script that names other files is never read. No length in a header decides
what is allocated or when reading stops. FFmpeg believes an MP4's index and any number
of tags, so these are checked before it opens a file.
"""

import io
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import av
import av.error
from av.audio.codeccontext import AudioCodecContext
from av.container import InputContainer
from av.stream import Disposition

from vllm_tts_cache.errors import InvalidAudioError

_FORMATS = "wav,flac,ogg,mp3,matroska,aac"
# FFmpeg reads a tag inside AAC as a whole, and unpacks what is in it.
_LARGE_ID3 = re.compile(rb"(?s)ID3[\x02-\x04][^\xff].([\x01-\x7f]|\0[\x04-\x7f])")
# The first boxes of MP4 and QuickTime files whose index is checked; FFmpeg opens no
# other MP4.
_MP4_BOXES = frozenset(b"ftyp free junk mdat moov pnot skip uuid wide".split())
_LOSSY_CODECS = frozenset({"aac", "mp1", "mp2", "mp3", "opus", "speex", "vorbis"})
_CODECS = _LOSSY_CODECS | {"alac", "flac"}
_WAV_ONLY = {f"pcm_{form}le" for form in ("s16", "s24", "s32", "f32", "f64")}
_WAV_ONLY |= {"adpcm_ima_wav", "adpcm_ms", "gsm_ms", "pcm_alaw", "pcm_mulaw", "pcm_u8"}
# The decoders that may run on a stranger's bytes, also when FFmpeg probes the tracks of
# a file. Some are not called like their codec.
_DECODERS = _CODECS | _WAV_ONLY | {"mp1float", "mp2float", "mp3float"}

# The longest clip of the slowest codec takes 1 s, and milliseconds of it to be opened.
_MAX_CPU_SECONDS = 5
_MAX_ERRORS = 1_000  # no recording has more, and each costs an exception
# Half an hour of AAC at 48 kHz; 30 s of anything have far fewer.
MAX_INDEX_ENTRIES = 100_000
_MAX_TAGS = 10_000  # FFmpeg takes a second for them
# What FFmpeg raises, and what PyAV raises on damaged headers.
_ERRORS = (av.error.FFmpegError, ArithmeticError, LookupError, RuntimeError, ValueError)

# A codec's delay and padding are three frames at most; not all encoders announce them.
MAX_PADDING_SAMPLES = 4_096
_MIN_LOSS_SECONDS = 0.05  # sizes and durations are rounded, or count the header
# A recorder that has not closed its file leaves 0 there or a size near 2 or 4 GiB.
_WAV_UNCLOSED_BYTES = 1 << 30
# MP3 with a count of its frames; without one FFmpeg guesses the duration by the size.
_MP3_COUNT = re.compile(b"Xing|Info|VBRI")
# The last page of an Ogg file: that of the last packet, or the one where it ends.
_OGG_END = re.compile(rb"\AOggS\0[\x04-\x07]|OggS\0\x05")
# ID3v2, ID3v1 and APE tags, which lie between files that were joined.
_TAG_PACKET = re.compile(rb"\A(ID3|TAG)|APETAGEX")


class ClipFile:
    """A file, to be decoded once.

    Attributes:
        is_lossy: Whether the codec pads its audio; known with the first frame.
        loss: How much was decoded, in words, if the file breaks off or is damaged, else
            None; known after the last frame.
    """

    def __init__(self, data: bytes):
        self._data = _without_tags(data)
        self._ends: list[av.Packet] = []  # the first and the last decoded packet
        self._errors: list[av.error.FFmpegError] = []
        self._num_samples = 0
        self.is_lossy = False
        self.loss: str | None = None

    def frames(self) -> Iterator[av.AudioFrame]:
        """Decode lazily; leave out a part that cannot be decoded, and set `loss`.

        Raises: InvalidAudioError: The format or the codec is not accepted, or no part
            of the file can be decoded.
        """
        with _opened(self._data) as file:
            stream = _audio_stream(file)
            self.is_lossy = stream.codec.canonical_name in _LOSSY_CODECS
            packets, decode = file.demux(stream), stream.codec_context.decode
            while len(self._errors) <= _MAX_ERRORS:
                packet = None  # after a place where the file cannot be read on
                try:
                    packet = next(packets, None)
                    frames = decode(packet)
                except av.error.EOFError:
                    break
                except av.error.MemoryError:
                    raise  # the fault of this machine, not of the file
                except av.error.FFmpegError as exc:
                    if packet is None or not _TAG_PACKET.search(bytes(packet)):
                        self._errors.append(exc)
                    continue
                if packet is not None and packet.size and frames:
                    self._ends[1:] = [packet]
                for frame in frames:
                    self._num_samples += frame.samples
                    yield frame
            if self._errors and not self._num_samples:
                raise self._errors[-1]
            self.loss = self._loss(file, stream) if self._ends else None

    def _loss(self, file: InputContainer, stream: av.AudioStream) -> str | None:
        """Say how much was decoded, if more was recorded.

        What was recorded follows from the packets' times, from a duration or size that
        the file announces, and from the last page of Ogg or frame of MP3.
        """
        first, last, data = self._ends[0], self._ends[-1], self._data
        rate = stream.codec_context.sample_rate
        heard, is_cut = self._num_samples / rate, bool(self._errors)
        tolerance = MAX_PADDING_SAMPLES / rate * self.is_lossy + _MIN_LOSS_SECONDS
        units = (last.pts or 0) + (last.duration or 0) - (first.pts or 0)
        seconds = float(units * (last.time_base or 0))
        name = file.format.name
        if name == "wav":
            start = first.pos or 0
            size = int.from_bytes(data[start - 4 : start], "little")
            if data[start - 8 : start - 4] == b"data" and size < _WAV_UNCLOSED_BYTES:
                seconds = max(seconds, heard * size / (len(data) - start))
        elif name != "aac" and (name != "mp3" or _MP3_COUNT.search(data, 0, 8_192)):
            announced = (stream.duration or 0) * (stream.time_base or 0)
            if len(file.streams) == 1:  # else it is that of the longest stream
                announced = (file.duration or 0) / av.time_base
            seconds = max(seconds, float(announced))
        if name == "ogg":
            rest = data[last.pos or 0 :]
            is_cut |= not _OGG_END.search(rest) or b"OggS\0\x02" in rest
        elif name == "mp3":
            is_cut |= last.size < _mp3_size(last)
        if seconds > heard + tolerance:
            return f"{heard:.2f} s of {seconds:.2f} s"
        return f"{heard:.2f} s" if is_cut else None


def _mp3_size(frame: av.Packet) -> int:
    """The bytes that a frame of this bit rate and duration has if it is whole."""
    decoder = AudioCodecContext.create("mp3", "r")
    decoder.bit_rate = 0  # the decoder sets only a bit rate of 0
    decoder.decode(frame)
    seconds = (frame.duration or 0) * (frame.time_base or 0)
    return int(seconds * decoder.bit_rate / 8)


class _BoundedFile(io.BytesIO):
    """A file in memory that ends early once the thread's CPU time passes ``until``."""

    until, is_late = 0.0, False

    def read(self, size: int | None = -1, /) -> bytes:
        self.is_late |= time.thread_time() > self.until
        # PyAV prints what a read raises, once for each time that FFmpeg tries again.
        return b"" if self.is_late else super().read(size)


@contextmanager
def _opened(data: bytes) -> Iterator[InputContainer]:
    _check_tags(data)
    if is_mp4 := data[4:8] in _MP4_BOXES:
        _check_mp4_index(data)
    is_wav = data.startswith(b"RIFF") and data[8:12] == b"WAVE"
    has_large_id3 = not is_wav and _LARGE_ID3.search(data)
    formats = _FORMATS.removesuffix(",aac") if has_large_id3 else _FORMATS
    source = _BoundedFile(data)
    source.until = time.thread_time() + _MAX_CPU_SECONDS / 5
    options = {
        "codec_whitelist": ",".join(sorted(_DECODERS)),
        "format_whitelist": "mov" if is_mp4 else formats,
        "protocol_whitelist": "",  # no other file
        "max_probe_packets": "0",  # else FFmpeg searches PCM for another codec
    }
    if not is_mp4:
        options["fflags"] = "+ignidx"  # WebM's cues would be sorted for seeking
    try:
        with av.open(
            source,
            "r",
            format="mov" if is_mp4 else None,
            container_options=options,
            metadata_errors="replace",
        ) as file:
            source.until = time.thread_time() + _MAX_CPU_SECONDS
            yield file
    except _ERRORS as exc:
        if not source.is_late:
            detail = exc.strerror if isinstance(exc, av.error.FFmpegError) else exc
            raise InvalidAudioError(
                f"it cannot be decoded ({detail}): its format is not recognised, its "
                "beginning is damaged, or a large ID3 tag is in it; accepted are WAV, "
                "FLAC, OGG (Vorbis, Opus, FLAC), MP3, MP4/M4A, AAC (ADTS) and WebM."
            ) from exc
    if source.is_late:
        raise InvalidAudioError(
            "reading it takes longer than that of any clip; remove its tags."
        )


def _audio_stream(file: InputContainer) -> av.AudioStream:
    """Return the audio track that is marked as the default, else the first one."""
    tracks = file.streams.audio
    if not tracks:
        raise InvalidAudioError("it has no audio track.")
    marked = (track for track in tracks if track.disposition & Disposition.default)
    stream = next(marked, tracks[0])
    context = stream.codec_context  # None if FFmpeg has no decoder for it
    codec = context.codec.canonical_name if context else "unknown"
    is_wav = file.format.name == "wav"
    if codec not in _CODECS and not (is_wav and codec in _WAV_ONLY):
        accepted = "PCM, ADPCM, GSM and MP3" if is_wav else ", ".join(sorted(_CODECS))
        raise InvalidAudioError(
            f"its codec is {codec}; accepted in this container are {accepted}."
        )
    return stream


def _without_tags(data: bytes) -> bytes:
    """Remove the ID3v2 tags at the beginning, and all tags of FLAC."""
    start = 0
    while data.startswith(b"ID3", start) and len(data) >= start + 10:
        size = 0
        for byte in data[start + 6 : start + 10]:  # seven bits each
            size = size << 7 | byte & 0x7F
        start += 10 + size + (10 if data[start + 5] & 0x10 else 0)
    data = data[start:]
    if not data.startswith(b"fLaC\0"):
        return data
    # The first block of metadata describes the stream.
    block, at = 0, 4
    while block < 0x80 and at + 4 <= len(data):
        block, at = data[at], at + 4 + _number(data, at + 1, 3)
    return b"".join((b"fLaC\x80", data[5:42], memoryview(data)[at:]))


def _check_tags(data: bytes) -> None:
    """Refuse more tags than any clip has.

    FFmpeg compares each tag with all before it, in one call that cannot be interrupted:
    a minute for a megabyte of short tags. By chance, 10 MiB of sound hold some hundred.
    """
    found = 0
    if data.startswith(b"OggS"):  # lengths of comments, and pages that may split them
        found = len(re.findall(rb"\0\0[^\0=]", data)) + data.count(b"OggS")
    elif data.startswith(b"\x1aE\xdf\xa3"):  # tags and chapters of WebM
        found = data.count(b"\x67\xc8") + data.count(b"\x73\xc4")
    if found > _MAX_TAGS:
        raise InvalidAudioError("it holds more tags than a clip has; remove them.")


def _check_mp4_index(data: bytes) -> None:
    """Refuse an index that claims more packets than any usable reference has.

    FFmpeg allocates tens of bytes for each packet, and a claim costs no bytes in the
    file: for 17 KB it took 2.4 GB. A compressed index (``cmov``) hides its claims.
    """
    index = _without_media(data)
    if b"moov" not in index or b"cmov" in index:
        raise InvalidAudioError(
            "it cannot be decoded: it breaks off before its index (moov), is a part of "
            "a stream that has none, or has a compressed one; send the whole file."
        )
    if (claimed := _claimed_packets(index)) > MAX_INDEX_ENTRIES:
        raise InvalidAudioError(
            f"its MP4 index claims {claimed} packets; at most {MAX_INDEX_ENTRIES} are "
            "allowed. If its codec is PCM, each sample is a packet: convert it to WAV."
        )


def _without_media(data: bytes) -> bytes:
    """Remove the media data, whose bytes would look like boxes by chance."""
    index, start = bytearray(), 0
    for _ in range(4_096):  # no clip has more boxes; the rest counts as one
        size = _number(data, start)
        if size == 1:
            size = _number(data, start + 8, 8)
        end = start + size if size >= 8 else len(data)
        if data[start + 4 : start + 8] != b"mdat":
            index += data[start:end]
        start = end
        if start >= len(data):
            break
    return bytes(index + data[start:])


def _claimed_packets(index: bytes) -> int:
    """An upper bound on the packets that FFmpeg makes of the index.

    Packets are counted by sample sizes and by fragments or, for PCM, by chunks; every
    edit may list all of them once more.
    """

    def total(skipped: int, *boxes: bytes) -> int:
        names = (name for box in boxes for name in re.finditer(box, index))
        return sum(_number(index, name.end() + skipped) for name in names)

    counted = total(8, b"stsz", b"stz2") + total(4, b"trun", b"stsc")
    if counted > MAX_INDEX_ENTRIES:
        return counted  # without the tables of chunks, whose length may be false
    # An entry: the number of the first chunk, the packets in each, a description.
    lengths = (
        _number(index, name.end() + 12 + 12 * entry)
        for name in re.finditer(b"stsc", index)
        for entry in range(_number(index, name.end() + 4))
    )
    in_chunks = total(4, b"stco", b"co64") * max(lengths, default=0)
    return max(counted, in_chunks) * max(1, total(4, b"elst"))


def _number(data: bytes, at: int, size: int = 4) -> int:
    return int.from_bytes(data[at : at + size], "big")
