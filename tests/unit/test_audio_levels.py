import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes, voiced
from vllm_tts_cache.audio.decode import active_level_dbfs, decode
from vllm_tts_cache.errors import InvalidAudioError
from vllm_tts_cache.store.encoding import audio_from_encoding, audio_to_encoding


def codes(samples, rate=24_000, subtype="FLOAT"):
    decoded = decode(sndfile_bytes(samples, rate, "WAV", subtype))
    return [warning.code for warning in decoded.warnings]


@pytest.mark.parametrize("rate", [8_000, 24_000, 192_000])
def test_active_level_of_a_sine_is_its_rms(rate):
    t = np.arange(rate * 2) / rate
    sine = (0.1 * np.sin(2 * np.pi * 200 * t)).astype(np.float32)
    assert active_level_dbfs(sine, rate) == pytest.approx(-23.01, abs=0.01)


@pytest.mark.parametrize(
    "samples",
    [
        np.zeros(48_000),
        np.full(48_000, 0.5),
        np.repeat([0.5, -0.5], 24_000),
        np.random.default_rng(0).normal(0, 1e-4, 48_000),
        np.where(np.arange(48_000) % 24_000 == 5_000, 1.0, 0.0),
    ],
    ids=["zeros", "constant", "step", "hiss", "two clicks"],
)
def test_silence_is_refused_with_its_level(samples):
    data = sndfile_bytes(samples.astype(np.float32), 24_000, "WAV", "FLOAT")
    with pytest.raises(InvalidAudioError, match=r"silent.*-60 dBFS.*loudest.*dBFS"):
        decode(data)


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT"])
def test_low_level_is_warned_of(subtype):
    assert codes(voiced(peak=0.005), subtype=subtype) == ["low_level"]


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT", "PCM_U8"])
def test_flat_tops_are_clipping(subtype):
    assert codes(np.clip(voiced(peak=3.0), -1, 1), subtype=subtype) == ["clipping"]


def test_clipping_of_one_channel_of_two_is_seen():
    clip = voiced(num_channels=2)
    clip[:, 0] = np.clip(clip[:, 0] * 6, -1, 1)
    assert codes(clip) == ["clipping"]


def test_sine_that_touches_full_scale_is_not_clipping():
    t = np.arange(48_000) / 24_000
    sine = np.sin(2 * np.pi * 220 * t).astype(np.float32)
    assert codes(sine, subtype="PCM_16") == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("num_channels", [1, 2])
def test_samples_that_are_not_finite_are_refused(bad, num_channels):
    clip = voiced(num_channels=num_channels)
    clip[1_000, -1] = bad
    with pytest.raises(InvalidAudioError, match="not finite"):
        decode(sndfile_bytes(clip, 24_000, "WAV", "FLOAT"))


def test_huge_finite_samples_do_not_overflow_the_level():
    assert codes(voiced() * np.float32(1e38)) == ["clipping"]


@pytest.mark.parametrize("factor", [-1.0, -0.98, -0.9])
@pytest.mark.parametrize("offset", [0.0, 0.1])
@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT"])
def test_of_channels_that_cancel_the_first_is_taken(factor, offset, subtype):
    left = voiced() + np.float32(offset)
    right = factor * voiced() + np.float32(offset)
    data = sndfile_bytes(np.hstack([left, right]), 24_000, "WAV", subtype)
    decoded = decode(data)
    assert [warning.code for warning in decoded.warnings] == ["one_channel"]
    alone = decode(sndfile_bytes(left, 24_000, "WAV", subtype))
    assert decoded.audio.audio_sha256 == alone.audio.audio_sha256
    stored = audio_to_encoding(decoded.audio, decoded.sources)
    again = audio_from_encoding(stored, decoded.audio.audio_sha256)
    assert again.audio_sha256 == decoded.audio.audio_sha256


@pytest.mark.parametrize(
    "right",
    [
        voiced(),
        0.3 * voiced(),
        np.zeros_like(voiced()),
        voiced(pitch_hz=333.0),
        -0.7 * voiced(),
        np.roll(voiced(), 12, axis=0),  # half a millisecond later
        np.random.default_rng(0).normal(0, 0.1, (48_000, 1)),
        voiced() + np.float32(0.2),
    ],
    ids=["same", "quieter", "none", "other", "turned", "later", "noise", "offset"],
)
def test_ordinary_stereo_stays_the_mean_over_channels(right):
    both = np.hstack([voiced(), right]).astype(np.float32)
    decoded = decode(sndfile_bytes(both, 24_000, "WAV", "FLOAT"))
    assert decoded.warnings == ()
    np.testing.assert_array_equal(decoded.audio.samples, np.mean(both, axis=-1))
