import pytest

from benchmarks.measure import (
    AtLeast,
    AtMost,
    RatioAtMost,
    Row,
    Summary,
    in_fresh_process,
    percentile,
)


def row(ours, reference=None, **fields):
    stock = None if reference is None else Summary.of(reference)
    return Row("w", "ms", Summary.of(ours), stock, **fields)


def test_the_spread_is_the_distance_between_the_quartiles():
    summary = Summary.of([5, 1, 2, 3, 4])
    assert (summary.median, summary.iqr) == (3.0, 2.0)
    assert Summary.of([7]).iqr == 0.0


def test_one_outlier_moves_neither_median_nor_spread_far():
    assert Summary.of([1, 1, 1, 1, 1000]).median == 1
    assert Summary.of([1, 1, 1, 1, 1000]).iqr == 0


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_what_cannot_be_summarized_is_refused(samples):
    with pytest.raises(ValueError):
        Summary.of(samples)


def test_percentiles_interpolate():
    assert percentile([0, 10], 50) == 5
    assert percentile(list(range(101)), 99) == 99


def test_a_limit_is_met_up_to_and_including_it():
    assert row([5.0], target=AtMost(5)).is_met is True
    assert row([5.1], target=AtMost(5)).is_met is False
    assert row([0], target=AtMost(0)).is_met is True


def test_a_floor_is_met_down_to_and_including_it():
    assert row([85.0], target=AtLeast(85)).is_met is True
    assert row([84.9], target=AtLeast(85)).is_met is False


def test_a_ratio_is_of_medians_and_judged_against_its_reference():
    twice = row([2, 4, 6], [1, 2, 3], target=RatioAtMost(1.5))
    assert twice.ratio == 2.0
    assert twice.is_met is False
    assert row([3], [2], target=RatioAtMost(1.5)).is_met is True


@pytest.mark.parametrize("reference", [None, [0.0], [-1.0]])
def test_a_ratio_to_nothing_is_neither_met_nor_missed(reference):
    without = row([1.0], reference, target=RatioAtMost(1.0))
    assert (without.ratio, without.is_met) == (None, None)


def test_a_row_without_a_target_is_not_judged():
    assert row([1.0], [2.0]).is_met is None


def test_a_failed_process_is_an_error_that_says_why():
    with pytest.raises(RuntimeError, match="directory"):
        in_fresh_process("benchmarks.written_voices", "ours")
