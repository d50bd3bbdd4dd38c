import numpy as np

from vllm_tts_cache.families.networks.mel import mel_filters

FILTERS = mel_filters(sample_rate_hz=24_000, num_fft=1024, num_mels=128, max_hz=12_000)
BIN_HZ = 24_000 / 1024


def test_there_is_one_row_per_mel_and_nobody_can_change_them():
    assert (FILTERS.shape, FILTERS.dtype) == ((128, 513), np.float32)
    assert not FILTERS.flags.writeable


def test_every_filter_has_one_peak_and_they_rise_in_order():
    for row in FILTERS:
        slopes = np.sign(np.diff(row))
        assert (np.diff(slopes[slopes != 0]) <= 0).all()
    assert (np.diff(FILTERS.argmax(axis=1)) >= 0).all()


def test_wide_filters_cover_equal_areas():
    """Narrow ones are sampled too coarsely by the FFT's bins for their sum to be 1."""
    areas = FILTERS[80:].sum(axis=1) * BIN_HZ
    assert np.allclose(areas, 1.0, atol=0.02)
