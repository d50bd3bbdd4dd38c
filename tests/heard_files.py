"""One spoken clip in the forms that real files have, and what ffmpeg hears of each.

Encoders are those of Debian's ffmpeg and of libsndfile; what no encoder writes on
demand (tags, joints, lies in headers) is done to their bytes.
"""

import io
import struct
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import numpy as np
import soundfile

from vllm_tts_cache.testing.clips import SPEECH

RATE = 24_000
_RAW = ("-ac", "1", "-ar", str(RATE), "-f", "f32le")
_AT_ONCE = 24
SECONDS = soundfile.info(SPEECH.path).duration


@dataclass(frozen=True)
class Form:
    """A file: how it is made, what it is called, how often the clip is in it."""

    make: Callable[[], bytes]
    suffix: str
    num_clips: float = 1.0
    track: int = 0
    warnings: list[str] = field(default_factory=list)


@cache
def heard_by_ffmpeg(name: str) -> np.ndarray:
    """Return what ffmpeg decodes of one of `FORMS`, mixed to one channel at `RATE`."""
    # It takes longer to start than to decode, so all are decoded by a few processes.
    names = list(FORMS)
    start = names.index(name) // _AT_ONCE * _AT_ONCE
    return _heard(tuple(names[start : start + _AT_ONCE]))[name]


@cache
def _heard(names: tuple[str, ...]) -> dict[str, np.ndarray]:
    inputs, outputs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            form = FORMS[name]
            path = Path(folder, f"{number}.{form.suffix}")
            path.write_bytes(form.make())
            inputs += ["-i", str(path)]
            outputs += ["-map", f"{number}:a:{form.track}", *_RAW, f"{path}.raw"]
        _ffmpeg(*inputs, *outputs)
        raw = [
            Path(folder, f"{n}.{FORMS[name].suffix}.raw")
            for n, name in enumerate(names)
        ]
        return {
            name: np.frombuffer(path.read_bytes(), np.float32)
            for name, path in zip(names, raw, strict=True)
        }


def piece_heard_by_ffmpeg(data: bytes) -> np.ndarray:
    """Return what ffmpeg decodes of a file that it may not be able to read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "clip.bin")
        path.write_bytes(data)
        done = _ffmpeg("-i", str(path), *_RAW, "-", check=False)
    return np.frombuffer(done.stdout, np.float32)


def _ffmpeg(*arguments: str, check: bool = True) -> "subprocess.CompletedProcess":
    command = ["ffmpeg", "-nostdin", "-loglevel", "error", "-y", *arguments]
    return subprocess.run(command, capture_output=True, check=check)


@cache
def encoded(suffix: str, *options: str) -> bytes:
    """Return the clip as ffmpeg encodes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"clip.{suffix}")
        _ffmpeg("-i", str(SPEECH.path), *options, str(path))
        return path.read_bytes()


@cache
def _samples() -> np.ndarray:
    return soundfile.read(SPEECH.path, dtype="int16")[0]


def _pcm() -> bytes:
    return _samples().astype("<i2").tobytes()


def _sndfile(container: str, subtype: str) -> bytes:
    file = io.BytesIO()
    samples = (_samples() / 2**15).astype(np.float32)
    soundfile.write(file, samples, 22_050, subtype, format=container)
    return file.getvalue()


def _chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    return name + struct.pack("<I", len(content) if size is None else size) + content


def _wav(size=None, riff=None, before=b"", after=b"") -> bytes:
    """A 16-bit WAV file whose chunks claim the sizes that they are given."""
    form = _chunk(b"fmt ", struct.pack("<HHIIHH", 1, 1, 22_050, 44_100, 2, 16))
    chunks = form + before + _chunk(b"data", _pcm(), size) + after
    return _chunk(b"RIFF", b"WAVE" + chunks, riff)


def synchsafe(number: int) -> bytes:
    return bytes(number >> shift & 0x7F for shift in (21, 14, 7, 0))


def _id3(num_bytes: int = 64, version: int = 3, footer: bool = False) -> bytes:
    title = b"TIT2" + struct.pack(">IH", 6, 0) + b"\0hello"
    body = title + bytes(max(0, num_bytes - len(title)))
    fields = bytes([version, 0, 0x10 if footer else 0]) + synchsafe(len(body))
    return b"ID3" + fields + body + (b"3DI" + fields if footer else b"")


def _id3_with_picture() -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, 3_000_000, dtype=np.uint8)
    picture = b"\0image/jpeg\0\3\0" + noise.tobytes()
    frame = b"APIC" + struct.pack(">IH", len(picture), 0) + picture
    return b"ID3\3\0\0" + synchsafe(len(frame)) + frame


def _ape_tag(with_header: bool) -> bytes:
    item = struct.pack("<II", 5, 0) + b"Title\0hello"
    size = struct.pack("<III", 2_000, len(item) + 32, 1)
    footer = b"APETAGEX" + size + struct.pack("<I", with_header << 31) + bytes(8)
    header = b"APETAGEX" + size + struct.pack("<I", 5 << 29) + bytes(8)
    return (header if with_header else b"") + item + footer


def _flac_with_picture() -> bytes:
    flac = encoded("flac")
    noise = np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.uint8)
    picture = struct.pack(">II", 3, 10) + b"image/jpeg" + bytes(20)
    picture += struct.pack(">I", noise.size) + noise.tobytes()
    return flac[:42] + b"\x06" + len(picture).to_bytes(3, "big") + picture + flac[42:]


def ogg_checksum(page: bytes) -> int:
    table = [0] * 256
    for byte in range(256):
        rest = byte << 24
        for _ in range(8):
            rest = rest << 1 & 0xFFFFFFFF ^ (0x04C11DB7 if rest >> 31 else 0)
        table[byte] = rest
    checksum = 0
    for byte in page:
        checksum = (checksum << 8 & 0xFFFFFFFF) ^ table[checksum >> 24 ^ byte]
    return checksum


def _opus_head(offset: int, value: bytes) -> bytes:
    """An Ogg Opus file with other bytes in its head, and a good checksum."""
    file = bytearray(encoded("opus"))
    at = file.find(b"OpusHead") + offset
    file[at : at + len(value)] = value
    num_bytes = 27 + file[26] + sum(file[27 : 27 + file[26]])
    file[22:26] = bytes(4)
    file[22:26] = struct.pack("<I", ogg_checksum(bytes(file[:num_bytes])))
    return bytes(file)


def _first_box(name: bytes, *options: str) -> bytes:
    """A QuickTime file whose first box is called otherwise; offsets stay right."""
    file = bytearray(encoded("mov", *options))
    assert file[4:8] == b"ftyp"
    file[4:8] = name
    return bytes(file)


def _without_boxes(num_boxes: int, *options: str) -> bytes:
    """A QuickTime file without its first boxes, its offsets corrected."""
    file, removed = encoded("mov", *options), 0
    for _ in range(num_boxes):
        removed += int.from_bytes(file[removed : removed + 4], "big")
    rest = bytearray(file[removed:])
    at = rest.rfind(b"stco") + 8
    for _ in range(int.from_bytes(rest[at : at + 4], "big")):
        at += 4
        offset = int.from_bytes(rest[at : at + 4], "big") - removed
        rest[at : at + 4] = offset.to_bytes(4, "big")
    return bytes(rest)


def _edited_m4a() -> bytes:
    """An M4A of which a recorder's trimming shows 2 s, from 1 s on."""
    file = bytearray(encoded("m4a", "-c:a", "aac"))
    at = file.find(b"elst") + 12
    file[at : at + 8] = struct.pack(">II", 2_000, 22_050)
    return bytes(file)


def _as(suffix: str, options: str = "") -> Callable[[], bytes]:
    return partial(encoded, suffix, *options.split())


def _joined(*parts: bytes | Callable[[], bytes]) -> bytes:
    return b"".join(part if isinstance(part, bytes) else part() for part in parts)


def _piped(suffix: str) -> bytes:
    return _ffmpeg("-i", str(SPEECH.path), "-f", suffix, "-").stdout


BARE = "-write_xing 0 -id3v2_version 0"
XING, CBR = _as("mp3", "-b:a 64k"), _as("mp3", f"-b:a 64k {BARE}")
VBR = _as("mp3", f"-q:a 4 {BARE}")
ADTS, M4A = _as("aac", "-c:a aac -f adts"), _as("m4a", "-c:a aac")
FAST = _as("m4a", "-c:a aac -movflags +faststart")
FRAGMENTS = "empty_moov+default_base_moof"
FRAGMENTED = _as(
    "mp4", f"-c:a aac -frag_duration 500000 -movflags frag_keyframe+{FRAGMENTS}"
)
OPUS, VORBIS = _as("opus"), _as("ogg", "-c:a libvorbis")
WEBM = _as("webm", "-c:a libopus")
LIVE = _as("webm", "-c:a libopus -f webm -live 1")
FLAC = _as("flac")

FORMS: dict[str, Form] = {}


def _add(name: str, suffix: str, make: Callable[[], bytes], **more: object) -> None:
    FORMS[name] = Form(make, suffix, **more)  # type: ignore[arg-type]


def _add_wav() -> None:
    subtypes = ["PCM_U8", "PCM_16", "PCM_24", "PCM_32"]
    subtypes += ["FLOAT", "DOUBLE", "ULAW", "ALAW"]
    for container in ("WAV", "WAVEX", "RF64"):
        for subtype in subtypes:
            _add(f"{container} {subtype}", "wav", partial(_sndfile, container, subtype))
    for subtype in ("IMA_ADPCM", "MS_ADPCM", "GSM610"):
        _add(f"WAV {subtype}", "wav", partial(_sndfile, "WAV", subtype))
    sizes = {"0": 0, "2G": 0x7FFFFFFF, "2G-": 0x7FFFF000, "4G": 0xFFFFFFFF}
    sizes |= {"4G-": 0xFFFFFF00, "3G": 0xC0000000}
    for name, size in sizes.items():
        _add(f"WAV unclosed, {name}", "wav", partial(_wav, size, size))
        _add(f"WAV of data {name}", "wav", partial(_wav, size))
        _add(f"WAV of RIFF {name}", "wav", partial(_wav, None, size))
    filler, junk = _chunk(b"FLLR", bytes(4_096 - 52)), _chunk(b"JUNK", bytes(28))
    _add("WAV unclosed, with a filler", "wav", partial(_wav, 0, 4_088, filler))
    _add("WAV unclosed, with JUNK", "wav", partial(_wav, 0, 0, junk))
    _add("WAV that counts its header", "wav", partial(_wav, len(_pcm()) + 44))
    _add("WAV that claims half", "wav", partial(_wav, len(_pcm()) // 2), num_clips=0.5)
    info = b"INFO" + _chunk(b"INAM", b"hello\0")
    word = b"INFO" + _chunk(b"ICMT", b"data of a clip\0\0")
    for name, chunk in {
        "LIST": _chunk(b"LIST", info),
        "the word data": _chunk(b"LIST", word),
        "bext": _chunk(b"bext", bytes(602)),
        "an odd chunk": _chunk(b"odd ", b"hello") + b"\0",
        "id3": _chunk(b"id3 ", _id3()),
    }.items():
        _add(f"WAV, {name} first", "wav", partial(_wav, before=chunk))
        _add(f"WAV, {name} last", "wav", partial(_wav, after=chunk))
    _add("WAV after a tag", "wav", partial(_joined, _id3(), _wav))
    _add("WAV, rubbish behind", "wav", partial(_joined, _wav, b"\xff" * 999))
    _add("WAV from a pipe", "wav", partial(_piped, "wav"))
    _add("BW64", "wav", lambda: b"BW64" + encoded("wav", "-rf64", "always")[4:])
    _add("MP3 in WAV", "wav", _as("wav", "-c:a libmp3lame"))
    for rate in (8_000, 11_025, 16_000, 44_100, 48_000, 96_000, 192_000):
        _add(f"WAV {rate}", "wav", _as("wav", f"-ar {rate}"))
    for count in ("2", "6"):
        _add(f"WAV of {count}", "wav", _as("wav", f"-ac {count}"))


def _add_flac() -> None:
    _add("FLAC", "flac", FLAC)
    for rate in (8_000, 44_100, 192_000):
        _add(f"FLAC {rate}", "flac", _as("flac", f"-ar {rate}"))
    _add("FLAC of 24 bits", "flac", _as("flac", "-sample_fmt s32"))
    _add("FLAC of 2", "flac", _as("flac", "-ac 2"))
    _add("FLAC from a pipe", "flac", partial(_piped, "flac"))
    _add("FLAC after a tag", "flac", partial(_joined, _id3(1_000), FLAC))
    _add("FLAC with a picture", "flac", _flac_with_picture)
    _add("Ogg FLAC", "oga", _as("oga", "-c:a flac"))
    _add("FLAC in MP4", "mp4", _as("mp4", "-c:a flac -strict -2"))
    _add("FLAC in MKV", "mkv", _as("mkv", "-c:a flac"))


def _add_mp3() -> None:
    _add("MP3", "mp3", XING)
    _add("MP3, no Xing", "mp3", CBR)
    for quality in ("0", "2", "4", "6", "9"):
        _add(f"MP3 V{quality}", "mp3", _as("mp3", f"-q:a {quality}"))
        # At 44.1 kHz the first frames, of silence, have another bit rate than speech.
        make = _as("mp3", f"-ar 44100 -q:a {quality} {BARE}")
        _add(f"MP3 V{quality}, no Xing", "mp3", make)
    _add("MP3 ABR, no Xing", "mp3", _as("mp3", f"-b:a 64k -abr 1 {BARE}"))
    for rate in (8_000, 16_000, 24_000, 32_000, 44_100, 48_000):
        _add(f"MP3 {rate}", "mp3", _as("mp3", f"-ar {rate}"))
        _add(f"MP3 {rate}, no Xing", "mp3", _as("mp3", f"-ar {rate} {BARE}"))
    _add("MP3 of 2", "mp3", _as("mp3", "-ac 2"))
    _add("MP3, not joint", "mp3", _as("mp3", "-ac 2 -joint_stereo 0"))
    _add("MP2", "mp2", _as("mp2", "-c:a mp2 -ar 44100"))
    _add("MP3 in MP4", "mp4", _as("mp4", "-c:a libmp3lame"))
    _add("MP3 in MKV", "mkv", _as("mkv", "-c:a libmp3lame"))
    for name, head in {
        "a tag": _id3(),
        "a tag and zeros": _id3() + bytes(1_024),
        "two tags": _id3() + _id3(version=4),
        "a tag with a footer": _id3(version=4, footer=True),
        "zeros": bytes(417),
        "many zeros": bytes(5_000),
        "a byte order mark": b"\xef\xbb\xbf",
        "a line": b"\r\n",
        "a picture": _id3_with_picture,
    }.items():
        for kind, make in {"MP3": XING, "CBR": CBR, "VBR": VBR}.items():
            if kind == "CBR" or "picture" not in name:
                _add(f"{kind} after {name}", "mp3", partial(_joined, head, make))
    for at in (1, 100, 333):
        _add(f"MP3 from byte {at} on", "mp3", lambda at=at: CBR()[at:])
        _add(f"VBR from byte {at} on", "mp3", lambda at=at: VBR()[at:])
    old_tag = b"TAG" + bytes(125)
    for name, tail in {
        "an ID3v1 tag": old_tag,
        "an APE tag": _ape_tag(with_header=True),
        "an APE tag without its header": _ape_tag(with_header=False),
        "both tags": _ape_tag(with_header=True) + old_tag,
    }.items():
        _add(f"MP3, {name} behind", "mp3", partial(_joined, CBR, tail))
        _add(f"Xing, {name} behind", "mp3", partial(_joined, XING, tail))
    for name, makes in {
        "Xing": (XING, XING),
        "CBR": (CBR, CBR),
        "VBR": (VBR, VBR),
        "Xing, CBR": (XING, CBR),
        "CBR, Xing": (CBR, XING),
        "Xing, VBR": (XING, VBR),
        "three": (XING, XING, XING),
        "with old tags": (partial(_joined, XING, old_tag),) * 2,
    }.items():
        make = partial(_joined, *makes)
        _add(f"joined MP3: {name}", "mp3", make, num_clips=len(makes))


def _add_aac() -> None:
    _add("M4A", "m4a", M4A)
    _add("M4A, index first", "m4a", FAST)
    _add("M4A of 6", "m4a", _as("m4a", "-c:a aac -ac 6"))
    _add("M4A of 2", "m4a", _as("m4a", "-c:a aac -ac 2"))
    _add("3GP", "3gp", _as("3gp", "-c:a aac -ar 16000"))
    _add("MP4 in fragments", "mp4", FRAGMENTED)
    each_frame = _as("mp4", f"-c:a aac -movflags frag_every_frame+{FRAGMENTS}")
    _add("MP4, each frame a fragment", "mp4", each_frame)
    _add("trimmed M4A", "m4a", _edited_m4a, num_clips=2.0 / SECONDS)
    _add("ALAC", "m4a", _as("m4a", "-c:a alac"))
    _add("ALAC in MOV", "mov", _as("mov", "-c:a alac"))
    for rate in (8_000, 16_000, 44_100, 48_000, 96_000):
        _add(f"M4A {rate}", "m4a", _as("m4a", f"-c:a aac -ar {rate}"))
    _add("ADTS", "aac", ADTS)
    _add("ADTS after a tag", "aac", partial(_joined, _id3(), ADTS))
    _add("joined ADTS", "aac", partial(_joined, ADTS, ADTS), num_clips=2)
    _add("AAC in MKV", "mka", _as("mka", "-c:a aac"))
    aac, fast = ("-c:a", "aac"), ("-c:a", "aac", "-movflags", "+faststart")
    _add("MOV", "mov", partial(encoded, "mov", *aac))
    for name in ("wide", "skip", "free"):
        begun = partial(_first_box, name.encode())
        _add(f"MOV from {name} on", "mov", partial(begun, *aac))
        _add(f"index first, from {name} on", "mov", partial(begun, *fast))
    _add("MOV from its index on", "mov", partial(_without_boxes, 1, *fast))
    _add("MOV from its media on", "mov", partial(_without_boxes, 2, *aac))


def _add_ogg() -> None:
    for rate in (8_000, 12_000, 16_000, 24_000, 48_000):
        _add(f"Opus {rate}", "ogg", _as("ogg", f"-c:a libopus -ar {rate}"))
    for milliseconds in ("2.5", "10", "60"):
        make = _as("opus", f"-frame_duration {milliseconds}")
        _add(f"Opus, {milliseconds} ms", "opus", make)
    _add("Opus of 2", "opus", _as("opus", "-ac 2"))
    for rate in (0, 11_025, 44_100, 96_000):
        make = partial(_opus_head, 12, struct.pack("<I", rate))
        _add(f"Opus that was {rate} Hz", "opus", make)
    for decibels in (-20, 6):
        make = partial(_opus_head, 16, struct.pack("<h", decibels * 256))
        _add(f"Opus with a gain of {decibels}", "opus", make)
    _add("Opus in MP4", "mp4", _as("mp4", "-c:a libopus -strict -2"))
    _add("Opus in MKV", "mkv", _as("mkv", "-c:a libopus"))
    _add("WebM", "webm", WEBM)
    _add("live WebM", "webm", LIVE)
    _add("joined WebM", "webm", partial(_joined, WEBM, WEBM), num_clips=2)
    _add("Vorbis", "ogg", VORBIS)
    _add("Vorbis of 2", "ogg", _as("ogg", "-c:a libvorbis -ac 2"))
    _add("Vorbis in WebM", "webm", _as("webm", "-c:a libvorbis"))
    _add("joined Opus", "opus", partial(_joined, OPUS, OPUS), num_clips=2)
    _add("joined Vorbis", "ogg", partial(_joined, VORBIS, VORBIS), num_clips=2)
    _add("Speex", "ogg", _as("ogg", "-c:a libspeex -ar 16000"))
    second = (
        "-f lavfi -t 5 -i anullsrc=r=22050:cl=mono -map 1:a -map 0:a -c:a aac "
        "-disposition:a:0 0 -disposition:a:1 default"
    )
    for suffix in ("mkv", "mov"):
        name = f"{suffix}, second track marked"
        _add(name, suffix, _as(suffix, second), track=1)


for _add_all in (_add_wav, _add_flac, _add_mp3, _add_aac, _add_ogg):
    _add_all()

# Bytes that break off somewhere in the middle, or have a hole there.
CUT = {"WAV": _wav, "FLAC": FLAC, "FLAC from a pipe": FORMS["FLAC from a pipe"].make}
CUT |= {"MP3": XING, "CBR": CBR, "VBR": VBR, "ADTS": ADTS, "M4A, index first": FAST}
CUT |= {"M4A": M4A, "MP4 in fragments": FRAGMENTED, "Opus": OPUS, "Vorbis": VORBIS}
CUT |= {"WebM": WEBM, "Ogg FLAC": FORMS["Ogg FLAC"].make, "ALAC": FORMS["ALAC"].make}

_NO_FORMAT = "format is not recognised.* WAV, FLAC, OGG .*MP3, MP4/M4A, AAC .*WebM"
REFUSED = {
    "AIFF": (_as("aiff"), _NO_FORMAT),
    "AIFF after a tag": (partial(_joined, _id3(0, 4), _as("aiff")), _NO_FORMAT),
    "AU": (_as("au"), _NO_FORMAT),
    "CAF": (_as("caf"), _NO_FORMAT),
    "W64": (_as("w64"), _NO_FORMAT),
    "WMA": (_as("wma"), _NO_FORMAT),
    "FLV": (_as("flv", "-c:a aac"), _NO_FORMAT),
    "transport stream": (_as("ts", "-c:a aac"), _NO_FORMAT),
    "AC-3": (_as("ac3"), _NO_FORMAT),
    "a page": (lambda: b"<!DOCTYPE html><html><body>404</body></html>", _NO_FORMAT),
    "words": (lambda: b"not audio", _NO_FORMAT),
    "a playlist": (lambda: b"#EXTM3U\n", _NO_FORMAT),
    "a picture": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(64), _NO_FORMAT),
    "zeros": (lambda: bytes(100_000), _NO_FORMAT),
    "AC-3 in WAV": (
        _as("wav", "-c:a ac3"),
        "codec is ac3; accepted in this container are PCM, ADPCM, GSM and",
    ),
    "AC-3 in MP4": (_as("mp4", "-c:a ac3"), "codec is ac3"),
    "AC-3 in MKV": (_as("mkv", "-c:a ac3"), "codec is ac3"),
    "PCM in MKV": (_as("mkv", "-c:a pcm_s16le"), "codec is pcm_s16le"),
    "PCM in MOV": (_as("mov", "-c:a pcm_s16le"), "codec is (PCM|pcm_s16le)"),
    "24 bits in MOV": (_as("mov", "-c:a pcm_s24le"), "codec is (PCM|pcm_s24le)"),
    "G.726 in WAV": (partial(_sndfile, "WAV", "G721_32"), "codec is adpcm_g726"),
}
