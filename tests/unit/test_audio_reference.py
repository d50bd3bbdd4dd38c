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


def clips(*lengths, rate_hz=24_000):
    random = np.random.default_rng(0)
    made = (random.uniform(-1, 1, n).astype(np.float32) for n in lengths)
    return [ReferenceAudio.of(samples, rate_hz) for samples in made]


def test_the_address_of_several_clips_depends_on_where_they_begin():
    (whole,) = clips(15)
    cuts = ((0,), (0, 5), (0, 6), (0, 5, 6))
    given = [ReferenceAudio.of(whole.samples, 24_000, cut) for cut in cuts]
    assert len({audio.audio_sha256 for audio in given}) == len(cuts)
    assert given[0].audio_sha256 == whole.audio_sha256


def test_the_address_of_several_clips_is_the_same_for_ever():
    samples = np.array([0.0, 0.5, -1.0], np.float32)
    assert ReferenceAudio.of(samples, 24_000, (0, 2)).audio_sha256 == (
        "0a22881092fd544af71cd401cce10635727fded1d41728e0b9c6faa6e114d795"
    )


@pytest.mark.parametrize(
    "starts",
    [(), (1,), (0, 0), (0, 5, 3), (0, 15), (0, 10**30), (0, -1), tuple(range(33))],
)
def test_cuts_that_leave_a_clip_empty_or_are_too_many_are_refused(starts):
    samples = np.zeros(15 if len(starts) < 33 else 100, np.float32)
    with pytest.raises(ValueError, match="clips"):
        ReferenceAudio.of(samples, 24_000, starts)


def test_clips_of_two_rates_are_not_joined():
    with pytest.raises(ValueError, match="16000, 24000"):
        ReferenceAudio.joined([*clips(5), *clips(5, rate_hz=16_000)])
