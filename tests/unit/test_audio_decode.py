import base64
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import soundfile

from tests.audio_clips import ffmpeg_bytes, sndfile_bytes, voiced
from vllm_tts_cache.audio.decode import decode, decode_data_url, decode_path
from vllm_tts_cache.errors import InvalidAudioError

LOSSLESS = [("WAV", "PCM_16"), ("WAV", "PCM_24"), ("WAV", "FLOAT"), ("WAV", "DOUBLE")]
LOSSLESS += [("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("RF64", "PCM_16")]
LOSSY = [("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")]
FFMPEG = [("mp4", "aac"), ("ipod", "aac"), ("adts", "aac"), ("ipod", "alac")]
FFMPEG += [("webm", "libopus"), ("webm", "vorbis")]


def data_url(data, head="data:audio/wav;base64"):
    return f"{head},{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("container, subtype", LOSSLESS + LOSSY)
@pytest.mark.parametrize("num_channels", [1, 2, 6])
def test_libsndfile_formats_give_what_soundfile_gives(container, subtype, num_channels):
    if container == "MP3" and num_channels > 2:
        pytest.skip("MP3 has two channels at most")
    clip = voiced(48_000, 3.1, num_channels)  # several blocks
    data = sndfile_bytes(clip, 48_000, container, subtype)
    expected, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    audio = decode(data).audio
    assert audio.sample_rate_hz == rate
    np.testing.assert_array_equal(audio.samples, np.mean(expected, axis=-1))


@pytest.mark.parametrize("container, codec", FFMPEG)
@pytest.mark.parametrize("num_channels", [1, 2, 6, 8])
def test_ffmpeg_formats_give_the_mean_over_channels(container, codec, num_channels):
    if codec == "vorbis" and num_channels != 2:
        pytest.skip("FFmpeg's encoder makes stereo only")
    if codec == "alac" and num_channels == 8:
        pytest.skip("FFmpeg's encoder wants another layout of eight")
    clip = voiced(48_000, 1.5, num_channels)
    audio = decode(ffmpeg_bytes(clip, 48_000, container, codec)).audio
    assert audio.sample_rate_hz == 48_000
    assert audio.seconds == pytest.approx(1.5, abs=0.1)
    want, got = np.mean(clip, axis=-1), audio.samples
    assert np.abs(got).max() == pytest.approx(np.abs(want).max(), rel=0.2)


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 96_000, 192_000])
def test_rate_is_kept(rate):
    data = sndfile_bytes(voiced(rate, 1.0), rate, "FLAC")
    assert decode(data).audio.sample_rate_hz == rate
    assert decode(data).audio.num_samples == rate


@pytest.mark.parametrize("rate", [8_000, 24_000, 96_000])
def test_aac_rates(rate):
    data = ffmpeg_bytes(voiced(rate, 2.0), rate, "mp4", "aac")
    assert decode(data).audio.sample_rate_hz == rate


def test_mp4_with_a_picture_track_gives_its_sound():
    data = ffmpeg_bytes(voiced(48_000, 1.5, 2), 48_000, "mp4", "aac", with_video=True)
    assert decode(data).audio.seconds == pytest.approx(1.5, abs=0.1)


def test_24_bits_survive():
    integers = np.arange(-(2**23), 2**23, 257, dtype=np.int64)
    samples = (integers / 2**23).astype(np.float32)
    for container in ("WAV", "FLAC"):
        data = sndfile_bytes(samples, 24_000, container, "PCM_24")
        np.testing.assert_array_equal(decode(data).audio.samples, samples)


def test_alac_and_16_bit_wav_are_one_audio():
    wav = sndfile_bytes(voiced(44_100), 44_100, "WAV", "PCM_16")
    samples, rate = soundfile.read(io.BytesIO(wav), dtype="float32", always_2d=True)
    alac = ffmpeg_bytes(samples, rate, "ipod", "alac")
    assert decode(alac).audio.audio_sha256 == decode(wav).audio.audio_sha256


def test_one_clip_is_one_audio_however_it_comes(tmp_path):
    clip = (voiced(44_100, num_channels=2) * 2**15).astype(np.int16)
    wav = sndfile_bytes(clip, 44_100, "WAV", "PCM_16")
    flac = sndfile_bytes(clip, 44_100, "FLAC", "PCM_16")
    (tmp_path / "clip").write_bytes(flac)
    decoded = [decode(wav), decode(flac), decode_path(tmp_path / "clip")]
    decoded += [decode_data_url(data_url(wav)), decode_data_url(data_url(flac))]
    assert len({d.audio.audio_sha256 for d in decoded}) == 1


@pytest.mark.parametrize("num_channels", [1, 2, 3, 7, 8, 9, 16])
def test_downmix_does_not_depend_on_where_blocks_end(num_channels):
    rng = np.random.default_rng(num_channels)
    clip = rng.uniform(-1, 1, (70_001, num_channels)).astype(np.float32)
    audio = decode(sndfile_bytes(clip, 24_000, "WAV", "FLOAT")).audio
    np.testing.assert_array_equal(audio.samples, np.mean(clip, axis=-1))


def test_id3_tags_before_mp3_and_aac_are_skipped():
    tag = b"ID3\x04\x00\x00\x00\x00\x01\x00" + bytes(128)
    mp3 = sndfile_bytes(voiced(44_100), 44_100, "MP3", "MPEG_LAYER_III")
    aac = ffmpeg_bytes(voiced(44_100), 44_100, "adts", "aac")
    for data in (mp3, aac):
        assert decode(tag + data).audio.seconds == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(
    "head",
    [
        "data:audio/wav;base64",
        "DATA:audio/x-wav;BASE64",
        "data:audio/webm;codecs=opus;base64",
        "data:video/mp4;base64",
    ],
)
def test_data_urls_of_sound_are_accepted_whatever_type_they_name(head):
    decode_data_url(data_url(sndfile_bytes(voiced(), 24_000), head))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "data:",
        "data:audio/wav;base64",
        "data:audio/wav,abcd",
        "data:text/plain;base64,abcd",
        "https://example.com/clip.wav",
        "file:///etc/passwd",
        "data:audio/" + "x" * 300 + ";base64,abcd",
        "data:audio/wav;base64,ab cd",
        "data:audio/wav;base64,abcd\n",
        "data:audio/wav;base64,abc",
        "data:audio/wav;base64,ab-_",
        "data:audio/wav;base64,\u00e9\u00e9\u00e9\u00e9",
        "data:audio/wav;base64,",
    ],
)
def test_anything_but_a_strict_base64_data_url_is_refused(url):
    with pytest.raises(InvalidAudioError):
        decode_data_url(url)


def test_path_that_cannot_be_read_is_refused_with_its_name(tmp_path):
    for path in (tmp_path / "missing.wav", tmp_path):
        with pytest.raises(InvalidAudioError, match=str(path)):
            decode_path(path)


def test_threads_that_decode_at_once_do_not_disturb_each_other():
    clips = [voiced(44_100, pitch_hz=pitch) for pitch in (110.0, 220.0, 330.0)]
    files = [sndfile_bytes(clip, 44_100, "MP3", "MPEG_LAYER_III") for clip in clips]
    files += [ffmpeg_bytes(clip, 44_100, "ipod", "aac") for clip in clips]
    alone = [decode(file).audio.audio_sha256 for file in files]
    with ThreadPoolExecutor(6) as pool:
        together = pool.map(decode, files * 4)
    assert [decoded.audio.audio_sha256 for decoded in together] == alone * 4
