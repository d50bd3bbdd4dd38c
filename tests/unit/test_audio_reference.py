import numpy as np
import pytest

from tests.audio_clips import voiced
from vllm_tts_cache.audio.reference import ReferenceAudio


def test_samples_are_a_frozen_copy():
    samples = voiced()[:, 0]
    audio = ReferenceAudio.of(samples, 24_000)
    samples[0] = 0.5
    assert audio.samples[0] == 0.0
    with pytest.raises(ValueError, match="read-only"):
        audio.samples[0] = 0.5


def test_address_depends_on_rate_and_on_every_sample():
    samples = voiced()[:, 0]
    changed = samples.copy()
    changed[-1] = np.nextafter(changed[-1], np.float32(1))
    given = [(samples, 24_000), (samples, 24_001), (changed, 24_000)]
    given.append((samples[:-1], 24_000))
    assert len({ReferenceAudio.of(s, rate).audio_sha256 for s, rate in given}) == 4


def test_address_is_the_same_for_ever():
    # Stored files are named by it; a change here loses every one of them.
    audio = ReferenceAudio.of(np.array([0.0, 0.5, -1.0], np.float32), 24_000)
    assert audio.audio_sha256 == (
        "81469444f4d87a390d5301427650bafaf200a9cb47aac1ff64b204e16a1fd81e"
    )


def test_negative_zero_is_zero():
    zeros = np.zeros(8, np.float32)
    one, other = ReferenceAudio.of(zeros, 8_000), ReferenceAudio.of(-zeros, 8_000)
    assert one.audio_sha256 == other.audio_sha256
    assert one.samples.tobytes() == other.samples.tobytes()


def test_memory_layout_does_not_change_the_address():
    samples = voiced(num_channels=2)
    strided = ReferenceAudio.of(samples[:, 1], 24_000)
    assert strided.audio_sha256 == (
        ReferenceAudio.of(samples[:, 1].copy(), 24_000).audio_sha256
    )


def test_length_is_known_in_samples_and_seconds():
    audio = ReferenceAudio.of(voiced(seconds=1.5)[:, 0], 24_000)
    assert (audio.num_samples, audio.seconds) == (36_000, 1.5)


@pytest.mark.parametrize(
    "samples",
    [
        np.zeros((4, 1), np.float32),
        np.zeros(4),
        np.zeros(0, np.float32),
        np.array([0, np.nan], np.float32),
        np.array([0, -np.inf], np.float32),
    ],
    ids=["2-D", "float64", "empty", "NaN", "Inf"],
)
def test_anything_but_finite_mono_float32_is_refused(samples):
    with pytest.raises(ValueError):
        ReferenceAudio.of(samples, 24_000)


def test_rate_must_be_positive():
    with pytest.raises(ValueError, match="rate"):
        ReferenceAudio.of(np.zeros(4, np.float32), 0)
