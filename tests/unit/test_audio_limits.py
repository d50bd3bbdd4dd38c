import base64
import io
import itertools
import struct
import tracemalloc
from pathlib import Path

import av
import numpy as np
import pytest

from tests.audio_clips import ffmpeg_bytes, sndfile_bytes, voiced
from vllm_tts_cache.audio.containers import MAX_INDEX_ENTRIES, ClipFile
from vllm_tts_cache.audio.decode import (
    CLIP_MAX_BYTES,
    blocks,
    decode,
    decode_data_url,
    decode_path,
    downmix,
    within_limits,
)
from vllm_tts_cache.errors import InvalidAudioError
from vllm_tts_cache.store.encoding import audio_from_encoding, audio_to_encoding


def refused(data, match, decode=decode):
    with pytest.raises(InvalidAudioError, match=match):
        decode(data)


def refused_cheaply(data, match, peak_max_bytes=8 * 1024**2, decode=decode):
    tracemalloc.start()
    try:
        refused(data, match, decode)
        assert tracemalloc.get_traced_memory()[1] < peak_max_bytes
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def hour():
    """One hour of near-silence at 8 kHz: 115 MB once decoded."""
    noise = np.random.default_rng(0).integers(-1, 2, 8_000, dtype=np.int16)
    return np.tile(noise, 3600)


def test_one_sample_less_or_more_is_refused():
    clip = voiced(8_000, 31.0)
    refused(sndfile_bytes(clip[:7_999], 8_000), r"lasts 1\.00 s; at least 1 s")
    refused(sndfile_bytes(clip[:240_001], 8_000), "longer than 30 s")


PADDED = [("ipod", "aac"), ("adts", "aac"), ("webm", "libopus"), ("ogg", "libopus")]
PADDED += [("mp3", "libmp3lame")]


@pytest.mark.parametrize("container, codec", PADDED)
@pytest.mark.parametrize("rate", [8_000, 48_000])
def test_exactly_30_s_are_taken_whatever_a_codec_pads(container, codec, rate):
    data = ffmpeg_bytes(voiced(rate, 30.0), rate, container, codec)
    decoded = decode(data)
    assert decoded.audio.seconds == pytest.approx(30.0, abs=1e-3)
    assert decoded.audio.seconds <= 30.0
    assert decoded.warnings == ()
    stored = audio_to_encoding(decoded.audio, decoded.sources)
    again = audio_from_encoding(stored, decoded.audio.audio_sha256)
    assert again.samples.tobytes() == decoded.audio.samples.tobytes()


@pytest.mark.parametrize("container, codec", [("adts", "aac"), ("webm", "libopus")])
def test_what_is_longer_than_padding_is_refused(container, codec):
    data = ffmpeg_bytes(voiced(48_000, 30.2), 48_000, container, codec)
    refused(data, "longer than 30 s")


def test_size_is_refused_before_anything_is_decoded(tmp_path):
    data = sndfile_bytes(voiced(), 24_000) + bytes(10 * 1024**2)
    refused(data, r"10\.1 MB; at most 10 MB")
    (tmp_path / "clip.wav").write_bytes(data)
    for path in (tmp_path / "clip.wav", Path("/dev/zero")):
        refused(path, "at most 10 MB", decode_path)


def test_size_of_a_data_url_is_refused_before_its_base64_is_decoded():
    url = "data:audio/wav;base64," + "A" * (32 * 1024**2)
    refused_cheaply(url, "at most 10 MB", 1024**2, decode_data_url)


@pytest.mark.parametrize("num_missing", [0, 1, 2])
def test_data_url_of_exactly_the_largest_size_is_decoded(num_missing):
    data = sndfile_bytes(voiced(), 24_000) + b"junk"
    num_left = CLIP_MAX_BYTES - num_missing - len(data) - 4
    data += struct.pack("<I", num_left) + bytes(num_left)
    decode_data_url("data:audio/wav;base64," + base64.b64encode(data).decode())


@pytest.mark.parametrize("rate", [7_999, 192_001])
def test_rate_out_of_bounds_is_refused(rate):
    refused(sndfile_bytes(voiced(rate), rate), f"{rate} Hz; allowed are 8000 to 192000")


@pytest.mark.parametrize("num_channels", [17, 512, 1024])
def test_too_many_channels_are_refused_cheaply(num_channels):
    data = sndfile_bytes(np.zeros((1_000, num_channels), np.int16), 8_000)
    is_for_ffmpeg = num_channels <= 512
    reason = f"{num_channels} channels; at most 16"
    refused_cheaply(data, reason if is_for_ffmpeg else "cannot be decoded")


def test_hour_of_flac_is_refused_without_unpacking_it(hour):
    data = sndfile_bytes(hour, 8_000, "FLAC")
    assert len(data) < 10 * 1024**2
    # The file is copied once, without its metadata.
    refused_cheaply(data, "longer than 30 s", peak_max_bytes=12 * 1024**2)


@pytest.mark.parametrize(
    "container, subtype", [("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")]
)
def test_long_lossy_clip_is_refused_without_unpacking_it(hour, container, subtype):
    data = sndfile_bytes(hour[: 8_000 * 240], 8_000, container, subtype)
    refused_cheaply(data, "longer than 30 s", peak_max_bytes=5 * 1024**2)


@pytest.mark.parametrize("container, codec", [("adts", "aac"), ("mp4", "aac")])
def test_long_aac_is_refused_without_unpacking_it(hour, container, codec):
    clip = hour[: 8_000 * 120, None].astype(np.float32) / 2**15
    data = ffmpeg_bytes(clip, 8_000, container, codec)
    refused_cheaply(data, "longer than 30 s", peak_max_bytes=3 * 1024**2)


def test_decoding_stops_one_block_past_the_limit():
    block = np.zeros((8_000, 2), np.float32), 8_000
    endless = itertools.count()
    each = (block for _ in endless)
    with pytest.raises(InvalidAudioError, match="longer"):
        downmix(within_limits(each))
    assert next(endless) == 31


def test_blocks_are_bounded_over_all_channels():
    data = sndfile_bytes(np.zeros((20_000, 60), np.int16), 8_000)
    sizes = [samples.size for samples, _ in blocks(ClipFile(data).frames())]
    assert max(sizes) <= 1 << 19


def test_wav_that_claims_4_gigabytes_is_still_bounded():
    data = bytearray(sndfile_bytes(voiced(8_000, 31.0), 8_000, "WAV", "PCM_16"))
    at = data.index(b"data") + 4
    data[at : at + 4] = struct.pack("<I", 0xFFFFFFFF)
    refused_cheaply(bytes(data), "longer than 30 s")


@pytest.mark.parametrize("claim", [0, 1, 2**36 - 1], ids=["unknown", "one", "most"])
@pytest.mark.parametrize("seconds", [2.0, 40.0])
def test_flac_header_that_lies_neither_bypasses_the_limit_nor_allocates(claim, seconds):
    data = bytearray(sndfile_bytes(voiced(8_000, seconds), 8_000, "FLAC"))
    # STREAMINFO: the last 36 bits before the MD5 sum count the samples.
    field = int.from_bytes(data[18:26], "big") >> 36 << 36 | claim
    data[18:26] = field.to_bytes(8, "big")
    tracemalloc.start()
    try:
        try:
            assert decode(bytes(data)).audio.seconds <= 30
        except InvalidAudioError as exc:
            assert seconds > 30 or claim == 1, exc
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024**2
    finally:
        tracemalloc.stop()


def box(kind, *numbers):
    return struct.pack(f">I4s{len(numbers)}I", 8 + 4 * len(numbers), kind, *numbers)


CLAIMS = {
    "sizes": box(b"stsz", 0, 1, 2**27),
    "compact": box(b"stz2", 0, 8, 2**27),
    "fragment": box(b"trun", 0, 2**27),
    "many fragments": box(b"trun", 0, 1_000) * 200,
    "chunks": box(b"stco", 0, 1, 8) + box(b"stsc", 0, 1, 1, 2**27, 1),
    "chunk tables": b"stsc" * 200_000,
    "edits": box(b"stsz", 0, 1, 50_000) + box(b"elst", 0, 4, *[0] * 12),
}


@pytest.mark.parametrize("claims", CLAIMS.values(), ids=CLAIMS)
def test_mp4_index_that_claims_more_than_it_could_hold_is_refused(claims):
    data = ffmpeg_bytes(voiced(), 24_000, "mp4", "aac")
    refused_cheaply(data + claims, f"at most {MAX_INDEX_ENTRIES}")


def test_mp4_index_that_claims_gigabytes_in_place_is_refused():
    data = bytearray(ffmpeg_bytes(voiced(), 24_000, "mp4", "aac"))
    at = data.index(b"stsz") + 8
    data[at : at + 8] = struct.pack(">II", 1, 2**27)
    refused_cheaply(bytes(data), f"at most {MAX_INDEX_ENTRIES}")


def test_compressed_mp4_index_is_refused():
    data = ffmpeg_bytes(voiced(), 24_000, "mp4", "aac")
    refused(data + box(b"cmov"), "compressed")


def test_mp4_index_is_not_looked_for_in_its_media():
    media = b"trun" + b"\xff" * 64 + b"cmov"
    mdat = struct.pack(">I4s", 8 + len(media), b"mdat") + media
    data = ffmpeg_bytes(voiced(), 24_000, "mp4", "aac")
    assert decode(data + mdat).audio.seconds == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("prefix", [b"", bytes(4) + b"ftypisom", b"\x1aE\xdf\xa3"])
@pytest.mark.parametrize(
    "playlist",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{0}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{0}'\n",
        "file '{0}'\n",
        "concat:{0}|{0}",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\nm=audio 5004 RTP/AVP 0\na={0}\n",
        '<?xml version="1.0"?><MPD><BaseURL>{0}</BaseURL></MPD>',
    ],
)
def test_playlists_that_name_another_file_are_refused(tmp_path, playlist, prefix):
    clip = tmp_path / "secret.wav"
    clip.write_bytes(sndfile_bytes(voiced(), 24_000))
    refused(prefix + playlist.format(clip).encode(), "accepted are|cannot be decoded")


def test_what_a_truncated_file_still_holds_is_what_the_whole_one_begins_with():
    data = sndfile_bytes(voiced(), 24_000)
    whole, half = decode(data).audio, decode(data[: 24_000 * 3]).audio
    assert 1.0 < half.seconds < whole.seconds
    np.testing.assert_array_equal(half.samples, whole.samples[: half.num_samples])


def test_clip_whose_rate_changes_midway_is_refused():
    slow = ffmpeg_bytes(voiced(24_000), 24_000, "mp3", "libmp3lame")
    fast = ffmpeg_bytes(voiced(48_000), 48_000, "mp3", "libmp3lame")
    refused(slow + fast, "sample rate changes midway")


def test_channels_may_change_midway():
    """Between blocks as well, which hold 57 frames of one channel or 29 of two."""
    one, two = (mp3_frames(voiced(48_000, 2.0, count), 48_000) for count in (1, 2))
    for first, second in ((one, two), (two, one)):
        for num_frames in (28, 29, 30, 56, 57, 58, 70):
            joined = decode(b"".join(first[:num_frames] + second[:70]))
            expected = (num_frames + 70) * 1_152 / 48_000
            assert joined.audio.seconds == pytest.approx(expected, abs=0.1)


def mp3_frames(samples, rate):
    data = ffmpeg_bytes(samples, rate, "mp3", "libmp3lame")
    with av.open(io.BytesIO(data), "r") as file:
        return [bytes(packet) for packet in file.demux() if packet.size]


def test_of_more_boxes_than_any_file_has_the_rest_is_one():
    """Each costs time; so what is media behind them is looked at as an index is."""
    data = ffmpeg_bytes(voiced(), 24_000, "mp4", "aac")
    free = (8).to_bytes(4, "big") + b"free"
    media = box(b"mdat", int.from_bytes(b"trun", "big"), 0, 2**27)
    assert decode(data + 10 * free + media).warnings == ()
    refused_cheaply(data + 10_000 * free + media, f"at most {MAX_INDEX_ENTRIES}")
