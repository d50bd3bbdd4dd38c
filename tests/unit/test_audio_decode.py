import base64
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import soundfile

from tests.audio_clips import ffmpeg_bytes, sndfile_bytes, voiced
from vllm_tts_cache.audio.decode import decode, decode_data_url, decode_path
from vllm_tts_cache.errors import InvalidAudioError

SUBTYPES = ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ALAW", "ULAW"]
LOSSLESS = [(form, sub) for form in ("WAV", "WAVEX", "RF64") for sub in SUBTYPES]
LOSSLESS += [("FLAC", "PCM_S8"), ("FLAC", "PCM_16"), ("FLAC", "PCM_24")]


def data_url(data, head="data:audio/wav;base64"):
    return f"{head},{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("container, subtype", LOSSLESS)
@pytest.mark.parametrize("num_channels", [1, 2, 6, 8])
def test_lossless_formats_give_what_libsndfile_gives(container, subtype, num_channels):
    """Their content addresses are older than FFmpeg's use."""
    clip = voiced(48_000, 3.1, num_channels)  # several blocks
    data = sndfile_bytes(clip, 48_000, container, subtype)
    expected, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    decoded = decode(data)
    assert decoded.audio.sample_rate_hz == rate
    np.testing.assert_array_equal(decoded.audio.samples, np.mean(expected, axis=-1))
    assert decoded.warnings == ()


def test_mp4_with_a_picture_track_gives_its_sound():
    data = ffmpeg_bytes(voiced(48_000, 1.5, 2), 48_000, "mp4", "aac", with_video=True)
    assert decode(data).audio.seconds == pytest.approx(1.5, abs=0.1)


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


@pytest.mark.parametrize(
    "head",
    [
        *("data:audio/wav;base64", "DATA:audio/x-wav;BASE64", "data:;base64"),
        *("data:audio/webm;codecs=opus;base64", "data:audio/ogg; codecs=opus;base64"),
        *("data:video/mp4;base64", "data:video/webm;codecs=vp8,opus;base64"),
        *("data:application/octet-stream;base64", "data:application/ogg;base64"),
        *("data:application/x-wav;charset=utf-8;base64", "data:text/plain;base64"),
    ],
)
def test_data_urls_are_accepted_whatever_type_they_name(head):
    decode_data_url(data_url(sndfile_bytes(voiced(), 24_000), head))


@pytest.mark.parametrize(
    "url",
    [
        *("", "data:", "data:audio/wav;base64", "data:audio/wav,abcd"),
        *("data:text/plain;base64,abcd", "data:audio/" + "x" * 300 + ";base64,abcd"),
        *("https://example.com/clip.wav", "file:///etc/passwd"),
        *(
            f"data:audio/wav;base64,{text}"
            for text in ("ab cd", "abcd\n", "abc", "ab-_", 4 * "\u00e9", "")
        ),
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
