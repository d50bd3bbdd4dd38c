"""Whatever bytes come, the only error is the one that names the audio as unusable."""

import base64
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.audio_clips import ffmpeg_bytes, sndfile_bytes, voiced
from tests.fault.hostile_input import NUM_CASES
from tests.heard_files import FORMS
from vllm_tts_cache.audio.decode import decode, decode_data_url
from vllm_tts_cache.errors import InvalidAudioError
from vllm_tts_cache.store.encoding import audio_from_encoding, audio_to_encoding

SEEDS = {
    "wav": lambda: sndfile_bytes(voiced(8_000, 1.2, 2), 8_000, "WAV", "PCM_24"),
    "wav-float": lambda: sndfile_bytes(voiced(8_000, 1.2), 8_000, "WAV", "FLOAT"),
    "flac": lambda: sndfile_bytes(voiced(8_000, 1.2, 2), 8_000, "FLAC", "PCM_16"),
    "vorbis": lambda: sndfile_bytes(voiced(8_000, 1.2), 8_000, "OGG", "VORBIS"),
    "opus": lambda: sndfile_bytes(voiced(8_000, 1.2), 8_000, "OGG", "OPUS"),
    "mp3": lambda: sndfile_bytes(voiced(8_000, 1.2), 8_000, "MP3", "MPEG_LAYER_III"),
    "m4a": lambda: ffmpeg_bytes(voiced(8_000, 1.2), 8_000, "ipod", "aac"),
    "alac": lambda: ffmpeg_bytes(voiced(8_000, 1.2), 8_000, "ipod", "alac"),
    "adts": lambda: ffmpeg_bytes(voiced(8_000, 1.2), 8_000, "adts", "aac"),
    "webm": lambda: ffmpeg_bytes(voiced(48_000, 1.2), 48_000, "webm", "libopus"),
}
SEEDS |= {
    name: FORMS[name].make
    for name in (
        *("AAC in MKV", "FLAC in MP4", "MOV", "MP2", "MP3 in WAV", "MP4 in fragments"),
        *("Ogg FLAC", "Speex", "WAV GSM610", "WAV IMA_ADPCM", "WAV MS_ADPCM"),
        *("WAV ULAW", "joined MP3: Xing", "joined Opus", "live WebM"),
    )
}
MAGIC = [b"RIFF\0\0\0\0WAVE", b"fLaC", b"OggS", b"ID3", b"\xff\xf1", b"\xff\xfb"]
MAGIC += [b"\x1aE\xdf\xa3", b"\0\0\0\x20ftypisom", b"\0\0\0\x08wide", b""]
MAGIC += [b"RF64\xff\xff\xff\xffWAVEds64", b"BW64\0\0\0\0WAVE", b"ID3\4\0\x10\0\0\0\0"]

fuzz = settings(max_examples=min(NUM_CASES // 15, 100))


@cache
def seed(name):
    return SEEDS[name]()


def decodes_or_is_refused(data):
    try:
        decoded = decode(data)
    except InvalidAudioError:
        return
    audio = decoded.audio
    assert 1.0 <= audio.seconds <= 30.0
    encoding = audio_to_encoding(audio, decoded.sources)
    stored = audio_from_encoding(encoding, audio.audio_sha256)
    assert stored.samples.tobytes() == audio.samples.tobytes()


@fuzz
@given(magic=st.sampled_from(MAGIC), rest=st.binary(max_size=512))
def test_arbitrary_bytes(magic, rest):
    decodes_or_is_refused(magic + rest)


@pytest.mark.parametrize("name", SEEDS)
@fuzz
@given(data=st.data())
def test_flipped_bytes(name, data):
    mutated = bytearray(seed(name))
    # Headers hold the lies that matter, so half of the flips go there.
    places = st.integers(0, len(mutated) - 1) | st.integers(0, 255)
    flips = st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8)
    for at, value in data.draw(flips):
        mutated[at] = value
    decodes_or_is_refused(bytes(mutated))


@pytest.mark.parametrize("name", SEEDS)
@fuzz
@given(data=st.data())
def test_missing_repeated_and_foreign_parts(name, data):
    whole = seed(name)
    cut = st.integers(0, len(whole))
    begin, end = sorted((data.draw(cut), data.draw(cut)))
    middle = data.draw(st.sampled_from([b"", whole[begin:end] * 2, b"\xff" * 64]))
    decodes_or_is_refused(whole[:begin] + middle + whole[end:])


@pytest.mark.parametrize("name", SEEDS)
def test_every_truncation_of_the_header(name):
    for length in [*range(64), *range(64, 512, 13)]:
        decodes_or_is_refused(seed(name)[:length])


@fuzz
@given(text=st.text(max_size=200))
@example("data:audio/wav;base64,=")
@example("data:audio/wav;base64," + base64.b64encode(b"RIFF").decode())
def test_arbitrary_text_as_a_data_url(text):
    for url in (text, f"data:audio/wav;base64,{text}"):
        with pytest.raises(InvalidAudioError):
            decode_data_url(url)
