"""Tags that would keep FFmpeg busy for minutes or hours cost a clip next to nothing."""

import itertools
import string
import struct
import time
import zlib

import numpy as np
import pytest

from tests.audio_clips import ffmpeg_bytes, sndfile_bytes, voiced
from tests.heard_files import ogg_checksum, synchsafe
from vllm_tts_cache.audio import containers
from vllm_tts_cache.audio.decode import decode
from vllm_tts_cache.errors import InvalidAudioError


def comments(number):
    """The body of a Vorbis comment with so many different ones."""
    letters = itertools.product(string.ascii_lowercase, repeat=5)
    each = ["".join(name) for name in itertools.islice(letters, number)]
    body = b"".join(struct.pack("<I", 7) + f"{name}=1".encode() for name in each)
    return struct.pack("<II", 0, number) + body


def flac_with(*blocks):
    flac = sndfile_bytes(voiced(), 24_000, "FLAC")
    made = (
        bytes([kind]) + len(body).to_bytes(3, "big") + body for kind, body in blocks
    )
    return flac[:4] + bytes([flac[4] & 0x7F]) + flac[5:42] + b"".join(made) + flac[42:]


def ogg_pages(packet, serial):
    """The second packet of a stream, from its second page on."""
    segments = [255] * (len(packet) // 255) + [len(packet) % 255]
    pages, at = b"", 0
    for number, start in enumerate(range(0, len(segments), 255), start=1):
        sizes = segments[start : start + 255]
        head = b"OggS\0" + bytes([number > 1]) + bytes(8) + serial
        head += struct.pack("<I", number) + bytes(4) + bytes([len(sizes), *sizes])
        page = head + packet[at : at + sum(sizes)]
        at += sum(sizes)
        pages += page[:22] + struct.pack("<I", ogg_checksum(page)) + page[26:]
    return pages


def opus_with(number):
    opus = ffmpeg_bytes(voiced(48_000), 48_000, "ogg", "libopus")
    first, second = opus.index(b"OggS", 4), opus.index(b"OggS", opus.index(b"OpusTags"))
    tags = ogg_pages(b"OpusTags" + comments(number), opus[14:18])
    return opus[:first] + tags + opus[second:]


def test_blocks_of_a_flac_file_are_left_out():
    """600,000 comments were hours of work."""
    noise = np.random.default_rng(0).bytes(1_000_000)
    plain = decode(sndfile_bytes(voiced(), 24_000, "FLAC"))
    many = decode(flac_with((4, comments(600_000)), (6, noise), (1, bytes(99))))
    assert many.audio.audio_sha256 == plain.audio.audio_sha256
    assert many.warnings == ()


def test_comments_of_an_ogg_file_are_bounded():
    plain = decode(ffmpeg_bytes(voiced(48_000), 48_000, "ogg", "libopus"))
    few = decode(opus_with(100))
    assert few.audio.audio_sha256 == plain.audio.audio_sha256
    with pytest.raises(InvalidAudioError, match="more tags than a clip has"):
        decode(opus_with(20_000))


def test_comments_are_bounded_where_pages_part_their_lengths():
    """A page of one byte each would hide them otherwise."""
    with pytest.raises(InvalidAudioError, match="more tags than a clip has"):
        decode(opus_with(100) + b"OggS" * 10_000)


def test_a_last_page_of_a_wrong_checksum_is_left_out_and_warned_of():
    opus = bytearray(ffmpeg_bytes(voiced(48_000), 48_000, "ogg", "libopus"))
    whole = decode(bytes(opus))
    assert whole.warnings == ()
    opus[opus.rindex(b"OggS") + 22] ^= 1
    part = decode(bytes(opus))
    assert part.audio.seconds < whole.audio.seconds
    assert [warning.code for warning in part.warnings] == ["truncated"]


def element(name, content):
    """One of EBML; its size in as many bytes as a master of any size needs."""
    return name + (1 << 56 | len(content)).to_bytes(8, "big") + content


def webm_with(*elements):
    """Those elements before the first cluster, in a segment without an end."""
    webm = bytearray(ffmpeg_bytes(voiced(48_000), 48_000, "webm", "libopus"))
    at = webm.index(b"\x18\x53\x80\x67") + 4
    webm[at : at + 8] = b"\x01" + b"\xff" * 7
    cluster = webm.index(b"\x1f\x43\xb6\x75")
    return bytes(webm[:cluster]) + b"".join(elements) + bytes(webm[cluster:])


def webm_tags(number):
    tags = b"".join(
        element(b"\x67\xc8", element(b"\x45\xa3", name) + element(b"\x44\x87", b"1"))
        for name in map(b"%d".__mod__, range(number))
    )
    tag = element(b"\x73\x73", element(b"\x63\xc0", b"") + tags)
    return element(b"\x12\x54\xc3\x67", tag)


def webm_chapters(number):
    """Each begins later than the last, and is called by a smaller number."""
    atoms = (
        element(b"\xb6", element(b"\x73\xc4", uid) + element(b"\x91", start))
        for uid, start in (
            ((number - n).to_bytes(4, "big"), (n + 1).to_bytes(4, "big"))
            for n in range(number)
        )
    )
    return element(b"\x10\x43\xa7\x70", element(b"\x45\xb9", b"".join(atoms)))


def webm_cues(number):
    cues = (
        element(
            b"\xbb",
            element(b"\xb3", n.to_bytes(4, "big"))
            + element(b"\xb7", element(b"\xf7", b"\1") + element(b"\xf1", b"\1")),
        )
        for n in range(number, 0, -1)
    )
    return element(b"\x1c\x53\xbb\x6b", b"".join(cues))


@pytest.mark.parametrize("many", [webm_tags, webm_chapters])
def test_tags_and_chapters_of_a_webm_file_are_bounded(many):
    """100,000 tags were minutes, and as many chapters half of one."""
    assert decode(webm_with(many(100))).warnings == ()
    with pytest.raises(InvalidAudioError, match="more tags than a clip has"):
        decode(webm_with(many(20_000)))


def test_cues_of_a_webm_file_are_not_sorted():
    """Ten seconds, of so many."""
    data = webm_with(webm_cues(180_000))
    began = time.thread_time()
    assert decode(data).warnings == ()
    assert time.thread_time() - began < 2


def id3_with(*frames):
    return b"ID3\4\0\0" + synchsafe(len(b"".join(frames))) + b"".join(frames)


def text_frames(number):
    for n in range(number):
        body = b"\0%06d\0x" % n
        yield b"TXXX" + synchsafe(len(body)) + b"\0\0" + body


def packed_frame(num_bytes):
    body = synchsafe(num_bytes) + zlib.compress(bytes(num_bytes), 9)
    return b"TIT2" + synchsafe(len(body)) + b"\0\x09" + body


def test_a_tag_amid_the_frames_of_aac_is_bounded():
    """One of 2 MB was half a minute, and took 4 GB."""
    adts = ffmpeg_bytes(voiced(), 24_000, "adts", "aac")
    small = decode(adts + id3_with(*text_frames(100)) + adts)
    assert small.audio.seconds == pytest.approx(2 * decode(adts).audio.seconds, abs=0.1)
    assert small.warnings == ()
    for tag in (id3_with(*text_frames(10_000)), id3_with(packed_frame(1 << 27))):
        with pytest.raises(InvalidAudioError, match="large ID3 tag is in it"):
            decode(adts + tag + adts)


def test_a_tag_in_a_wav_file_takes_seconds_at_most():
    """It was half a minute."""
    wav, tag = sndfile_bytes(voiced(), 24_000), id3_with(*text_frames(100_000))
    chunk = b"id3 " + struct.pack("<I", len(tag)) + tag
    began = time.thread_time()
    with pytest.raises(InvalidAudioError, match="longer than that of any clip"):
        decode(wav[:36] + chunk + wav[36:])
    assert time.thread_time() - began < 20


def test_a_file_that_takes_too_much_time_to_read_ends(monkeypatch, capfd):
    monkeypatch.setattr(containers, "_MAX_CPU_SECONDS", -1)
    for data in (
        sndfile_bytes(voiced(), 24_000),
        ffmpeg_bytes(voiced(), 24_000, "mp4", "aac"),
        ffmpeg_bytes(voiced(48_000), 48_000, "webm", "libopus"),
    ):
        with pytest.raises(InvalidAudioError, match="longer than that of any clip"):
            decode(data)
    assert capfd.readouterr() == ("", "")
