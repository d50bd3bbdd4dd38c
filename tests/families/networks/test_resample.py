import numpy as np
import pytest
import soxr

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.families.networks.resample import num_resampled, resample


def noise(num_samples, rate_hz):
    samples = np.random.default_rng(0).standard_normal(num_samples) * 0.1
    return ReferenceAudio.of(samples.astype(np.float32), rate_hz)


def test_audio_at_the_wanted_rate_is_handed_on_untouched():
    audio = noise(24_000, 24_000)
    assert resample(audio, 24_000) is audio.samples


@pytest.mark.parametrize(
    ("rate_hz", "num_samples", "expected"),
    [
        (8_000, 8_001, 24_003),
        (48_000, 48_017, 24_009),
        (44_100, 44_101, 24_001),
        # Exactly 24,000 and 24,960; librosa's floating point rounds both up.
        (44_100, 44_100, 24_001),
        (44_100, 45_864, 24_961),
    ],
)
def test_lengths_are_rounded_as_librosa_rounds_them(rate_hz, num_samples, expected):
    resampled = resample(noise(num_samples, rate_hz), 24_000)
    assert resampled.dtype == np.float32
    assert resampled.shape == (expected,)
    assert num_resampled(num_samples, rate_hz, 24_000) == expected


def test_an_extra_sample_is_zero_and_the_others_are_soxr_high_quality():
    audio = noise(44_100, 44_100)
    resampled = resample(audio, 24_000)
    assert np.array_equal(
        resampled[:-1], soxr.resample(audio.samples, 44_100, 24_000, quality="HQ")
    )
    assert resampled[-1] == 0
