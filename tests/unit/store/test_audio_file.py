import dataclasses
import hashlib

import av
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.audio_clips import ffmpeg_bytes, sndfile_bytes, voiced
from vllm_tts_cache.audio.decode import decode, decode_clips
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import SourceCorruptError, StorageError
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.store import encoding as encoding_module
from vllm_tts_cache.store.encoding import (
    FLAC,
    RATE,
    SAMPLES,
    STARTS,
    UPLOAD,
    Encoding,
    EncodingKey,
    audio_from_encoding,
    audio_to_encoding,
    encoding_from_bytes,
    encoding_to_bytes,
)

MONO, STEREO = voiced(24_000, 3.0), voiced(24_000, 3.0, 2)
OTHER = hashlib.sha256(b"other").hexdigest()


def noisy(clip, seed=0):
    """A clip as a microphone makes it: no format compresses its last bits."""
    noise = np.random.default_rng(seed).normal(0, 0.003, clip.shape)
    return (clip + noise).astype(np.float32)


# What a client sends -> which form it is stored in.
UPLOADS = {
    "wav-8": (lambda: sndfile_bytes(MONO, 24_000, "WAV", "PCM_U8"), FLAC),
    "wav-16": (lambda: sndfile_bytes(noisy(MONO), 24_000), FLAC),
    "wav-16-stereo": (lambda: sndfile_bytes(noisy(STEREO), 24_000), FLAC),
    "wav-24": (lambda: sndfile_bytes(noisy(MONO), 24_000, "WAV", "PCM_24"), FLAC),
    "wav-24-192k": (
        lambda: sndfile_bytes(noisy(voiced(192_000)), 192_000, "WAV", "PCM_24"),
        FLAC,
    ),
    "wav-32": (lambda: sndfile_bytes(noisy(MONO), 24_000, "WAV", "PCM_32"), SAMPLES),
    "wav-float": (lambda: sndfile_bytes(noisy(MONO), 24_000, "WAV", "FLOAT"), SAMPLES),
    "wav-float-stereo": (
        lambda: sndfile_bytes(noisy(STEREO), 24_000, "WAV", "FLOAT"),
        SAMPLES,
    ),
    "wav-ulaw": (lambda: sndfile_bytes(MONO, 24_000, "WAV", "ULAW"), None),
    "flac-16": (lambda: sndfile_bytes(noisy(MONO), 24_000, "FLAC"), FLAC),
    "flac-16-stereo": (lambda: sndfile_bytes(noisy(STEREO), 24_000, "FLAC"), FLAC),
    "flac-24": (lambda: sndfile_bytes(noisy(MONO), 24_000, "FLAC", "PCM_24"), FLAC),
    "flac-24-stereo": (
        lambda: sndfile_bytes(noisy(STEREO), 24_000, "FLAC", "PCM_24"),
        None,
    ),
    "vorbis": (lambda: sndfile_bytes(STEREO, 24_000, "OGG", "VORBIS"), UPLOAD),
    "opus": (lambda: sndfile_bytes(MONO, 24_000, "OGG", "OPUS"), UPLOAD),
    "mp3": (lambda: sndfile_bytes(MONO, 24_000, "MP3", "MPEG_LAYER_III"), UPLOAD),
    "m4a": (lambda: ffmpeg_bytes(MONO, 24_000, "ipod", "aac"), UPLOAD),
    "alac": (lambda: ffmpeg_bytes(noisy(MONO), 24_000, "ipod", "alac"), FLAC),
    "adts": (lambda: ffmpeg_bytes(MONO, 24_000, "adts", "aac"), UPLOAD),
    "mp4": (lambda: ffmpeg_bytes(STEREO, 24_000, "mp4", "aac"), UPLOAD),
    "webm": (lambda: ffmpeg_bytes(MONO, 48_000, "webm", "libopus"), UPLOAD),
}


def same(one: ReferenceAudio, other: ReferenceAudio) -> bool:
    bits = one.samples.tobytes() == other.samples.tobytes()
    facts = ("sample_rate_hz", "audio_sha256", "clip_starts")
    return bits and all(getattr(one, fact) == getattr(other, fact) for fact in facts)


def through_a_file(encoding: Encoding) -> tuple[Encoding, int]:
    """What the store reads back, and how many bytes it stored."""
    key = EncodingKey(audio_sha256="a" * 64, encoder_fingerprint="audio")
    blob = encoding_to_bytes(key, encoding)
    return encoding_from_bytes(blob, key), len(blob)


def form_of(encoding: Encoding) -> str:
    (form,) = set(encoding.arrays) - {RATE}
    return form


@pytest.mark.parametrize("name", UPLOADS)
def test_every_upload_comes_back_bit_for_bit_from_no_more_bytes_than_it_had(name):
    make, form = UPLOADS[name]
    data = make()
    decoded = decode(data)
    assert decoded.sources == (data,)
    stored, num_bytes = through_a_file(
        audio_to_encoding(decoded.audio, decoded.sources)
    )
    assert same(audio_from_encoding(stored, decoded.audio.audio_sha256), decoded.audio)
    assert num_bytes <= 1.05 * len(data) + 512
    assert form in (None, form_of(stored))


GRID_16 = arrays.arrays(np.int16, st.integers(1, 200)).map(
    lambda numbers: numbers.astype(np.float32) / np.float32(2**15)
)
GRID_24 = arrays.arrays(
    np.int32, st.integers(1, 200), elements=st.integers(-(2**23), 2**23 - 1)
).map(lambda numbers: numbers.astype(np.float32) / np.float32(2**23))
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
FLOATS = arrays.arrays(np.float32, st.integers(1, 200), elements=FINITE)
SOME_RATES = [1, 8_000, 44_100, 65_537, 192_000, 655_350, 655_351, 10**7]
RATES = st.sampled_from(SOME_RATES) | st.integers(1, 2**31)


@settings(max_examples=300)
@given(samples=GRID_16 | GRID_24 | FLOATS, rate=RATES)
@example(samples=np.array([1.0, -1.0], np.float32), rate=24_000)
@example(samples=np.array([-1.0, 1.0 - 2.0**-15], np.float32), rate=24_000)
@example(samples=np.array([-1.0, 1.0 - 2.0**-23], np.float32), rate=24_000)
@example(samples=np.array([2.0**-149, -0.0], np.float32), rate=8_000)
@example(samples=np.full(5000, 3e38, np.float32), rate=8_000)
@example(samples=np.zeros(1, np.float32), rate=1 << 31)
def test_any_samples_at_any_rate_come_back_bit_for_bit(samples, rate):
    audio = ReferenceAudio.of(samples, rate)
    stored, _ = through_a_file(audio_to_encoding(audio))
    assert same(audio_from_encoding(stored, audio.audio_sha256), audio)


def test_one_sample_off_the_grid_keeps_the_audio_out_of_flac():
    samples = decode(sndfile_bytes(noisy(MONO), 24_000)).audio.samples.copy()
    on_grid = ReferenceAudio.of(samples, 24_000)
    samples[1234] += np.float32(2.0**-24)
    off_grid = ReferenceAudio.of(samples, 24_000)
    assert form_of(audio_to_encoding(on_grid)) == FLAC
    assert form_of(audio_to_encoding(off_grid)) == SAMPLES


def in_clips(audio, *starts):
    return ReferenceAudio.of(audio.samples, audio.sample_rate_hz, starts)


@pytest.mark.parametrize(("name", "form"), (("wav-16", FLAC), ("wav-float", SAMPLES)))
def test_the_cuts_of_several_clips_are_stored_with_them(name, form):
    whole = decode(UPLOADS[name][0]()).audio
    audio = in_clips(whole, 0, 30_000, 50_000)
    stored, _ = through_a_file(audio_to_encoding(audio))
    assert set(stored.arrays) == {form, RATE, STARTS}
    assert same(audio_from_encoding(stored, audio.audio_sha256), audio)
    alone, _ = through_a_file(audio_to_encoding(whole))
    assert alone[form].tobytes() == stored[form].tobytes()


@pytest.mark.parametrize(
    "starts",
    (
        np.array([0, 30_001]),
        np.array([0]),
        np.array([30_000, 0]),
        np.array([0, 1 << 62]),
        np.array([0, -1]),
        np.array([[0, 30_000]]),
        np.array([0.0, np.nan]),
        np.arange(500),
        np.zeros(0, np.int64),
    ),
    ids=str,
)
@pytest.mark.parametrize("name", ("wav-16", "wav-float"))
def test_other_cuts_are_corrupt(name, starts):
    audio = in_clips(decode(UPLOADS[name][0]()).audio, 0, 30_000)
    arrays = {**audio_to_encoding(audio).arrays, STARTS: starts}
    with pytest.raises(SourceCorruptError):
        audio_from_encoding(Encoding(arrays), audio.audio_sha256)


def test_an_upload_is_one_clip():
    data = UPLOADS["mp3"][0]()
    decoded = decode(data)
    arrays = dict(audio_to_encoding(decoded.audio, [data]).arrays)
    arrays[STARTS] = np.array([0, 30_000])
    with pytest.raises(SourceCorruptError):
        audio_from_encoding(Encoding(arrays), decoded.audio.audio_sha256)


# What a client sends of one voice -> what is stored apart; None: one sound, with cuts.
SEVERAL = {
    "1": (("mp3",), ()),
    "mp3": (("mp3", "mp3"), ("0/upload", "1/upload")),
    "opus": (("opus", "opus"), ("0/upload", "1/upload")),
    "vorbis and m4a": (("vorbis", "m4a"), ("0/upload", "1/upload")),
    "wav and mp3": (
        ("wav-16", "mp3", "wav-float"),
        ("0/flac", "1/upload", "2/samples"),
    ),
    "wav": (("wav-16", "wav-24"), None),
    "float": (("wav-float", "wav-32"), None),
}


def files_of(name):
    return [UPLOADS[kind][0]() for kind in SEVERAL[name][0]]


@pytest.mark.parametrize("name", SEVERAL)
def test_several_uploads_come_back_bit_for_bit_from_no_more_bytes_than_they_had(name):
    files, forms = files_of(name), SEVERAL[name][1]
    decoded = decode_clips(files)
    stored, num_bytes = through_a_file(
        audio_to_encoding(decoded.audio, decoded.sources)
    )
    assert same(audio_from_encoding(stored, decoded.audio.audio_sha256), decoded.audio)
    assert num_bytes <= 1.05 * sum(map(len, files)) + 512
    apart = {each for each in stored.arrays if "/" in each}
    assert apart == set(forms or ())
    assert (STARTS in stored.arrays) == (forms is None)


def test_lossy_clips_that_were_stored_as_one_before_are_read():
    audio = decode_clips(files_of("mp3")).audio
    arrays = {SAMPLES: audio.samples, STARTS: np.array(audio.clip_starts)}
    arrays |= {RATE: np.array([audio.sample_rate_hz])}
    stored, _ = through_a_file(Encoding(arrays))
    assert same(audio_from_encoding(stored, audio.audio_sha256), audio)


@pytest.mark.parametrize(
    "spoil",
    (
        lambda arrays: arrays | {STARTS: np.array([0, 30_000])},
        lambda arrays: arrays | {SAMPLES: np.ones(3, np.float32)},
        lambda arrays: {name: a for name, a in arrays.items() if name != "0/flac"},
        lambda arrays: arrays | {"1/noise": arrays.pop("1/flac")},
        lambda arrays: arrays | {"1/flac": arrays["0/flac"]},
    ),
)
def test_clips_by_themselves_that_are_not_all_there_are_corrupt(spoil):
    decoded = decode_clips(files_of("wav"))
    clips = map(audio_to_encoding, decoded.audio.clips())
    arrays = {f"{number}/{FLAC}": clip[FLAC] for number, clip in enumerate(clips)}
    arrays |= {RATE: np.array([24_000])}
    sha = decoded.audio.audio_sha256
    assert same(audio_from_encoding(Encoding(arrays), sha), decoded.audio)
    with pytest.raises(SourceCorruptError):
        audio_from_encoding(Encoding(spoil(dict(arrays))), sha)


@pytest.mark.parametrize("clips", ["1", "mp3"])
def test_an_upload_that_nothing_decodes_any_more_is_not_called_corrupt(clips):
    decoded = decode_clips(files_of(clips))
    arrays = dict(audio_to_encoding(decoded.audio, decoded.sources).arrays)
    spoilt = "1/upload" if "1/upload" in arrays else UPLOAD
    arrays[spoilt] = np.frombuffer(b"a format of the past", np.uint8)
    with pytest.raises(StorageError, match="cannot be decoded") as caught:
        audio_from_encoding(Encoding(arrays), decoded.audio.audio_sha256)
    assert not isinstance(caught.value, SourceCorruptError)


@pytest.mark.parametrize("name", ["wav-16", "wav-float"])
def test_samples_of_another_address_are_corrupt(name):
    decoded = decode(UPLOADS[name][0]())
    encoding = audio_to_encoding(decoded.audio)
    with pytest.raises(SourceCorruptError, match=decoded.audio.audio_sha256) as caught:
        audio_from_encoding(encoding, OTHER)
    assert OTHER in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"codes": np.zeros(3, np.int16)},
        {RATE: np.array([8_000])},
        {RATE: np.zeros(0, np.int64), SAMPLES: np.ones(3, np.float32)},
        {RATE: np.array([8_000]), SAMPLES: np.ones(3, np.float64)},
        {RATE: np.array([0]), SAMPLES: np.ones(3, np.float32)},
        {RATE: np.array([8_000]), FLAC: np.frombuffer(b"fLaC, not", np.uint8)},
    ],
    ids=["an encoding", "no samples", "no rate", "float64", "zero Hz", "no FLAC"],
)
def test_arrays_that_are_no_audio_are_corrupt(wrong):
    with pytest.raises(SourceCorruptError):
        audio_from_encoding(Encoding(wrong), OTHER)


@pytest.mark.parametrize("clips", ["1", "mp3"])
def test_what_a_newer_decoder_reads_otherwise_is_used(clips, monkeypatch, plugin_log):
    log = ThrottledLog()
    monkeypatch.setattr(encoding_module, "_log", log)
    decoded = decode_clips(files_of(clips))
    encoding = audio_to_encoding(decoded.audio, decoded.sources)
    for _ in range(3):
        audio = audio_from_encoding(encoding, OTHER)
        assert same(audio, dataclasses.replace(decoded.audio, audio_sha256=OTHER))
    assert len(plugin_log.messages) == 1
    assert OTHER in plugin_log.messages[0]


def test_audio_that_there_is_no_memory_for_is_not_called_corrupt(monkeypatch):
    """It would be set aside, or deleted from a bucket for everybody."""
    samples = (voiced() * 32767).astype(np.int16)
    audio = decode(sndfile_bytes(samples, 24_000, "WAV")).audio
    encoding = audio_to_encoding(audio, ())
    assert FLAC in encoding.arrays

    def fail(*_args, **_kwargs):
        raise MemoryError

    monkeypatch.setattr(av, "open", fail)
    with pytest.raises(StorageError, match="is whole") as caught:
        audio_from_encoding(encoding, audio.audio_sha256)
    assert not isinstance(caught.value, SourceCorruptError)
