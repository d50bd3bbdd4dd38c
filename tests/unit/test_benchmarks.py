import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from benchmarks import float32_encoders, results, table
from benchmarks.bench import Bench
from benchmarks.clips import SAMPLE_RATE_HZ, clip
from benchmarks.rows import AtMost, RatioAtMost, Row, Summary, percentile
from benchmarks.runner import SCENARIOS
from benchmarks.timing import each_us, per_call_us
from vllm_tts_cache.audio.decode import decode

ROOT = Path(__file__).resolve().parents[2]


def row(ours, reference=None, **fields):
    given = {"scenario": "s", "what": "w", "unit": "ms", **fields}
    stock = None if reference is None else Summary.of(reference)
    return Row(ours=Summary.of(ours), reference=stock, **given)


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


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (1.234, "1.23"),
        (99.99, "99.99"),
        (1234.6, "1235"),
    ],
)
def test_numbers_keep_the_digits_that_count(value, shown):
    assert table.number(value) == shown


def test_a_missed_target_stays_in_the_table():
    text = table.markdown([row([3, 3], [1, 1], target=RatioAtMost(2.0), note="n")])
    heading, rule, line = text.splitlines()
    assert heading.count("|") == rule.count("|") == line.count("|")
    assert line == "| s | w (n) | ms | 3.00 (0) | 1.00 (0) | 3.00 | <= 2x | NO |"


def test_another_reference_than_stock_is_named():
    (cells,) = [table.cells(row([1], [2], versus="plain read"))]
    assert "plain read: 2.00 (0)" in cells
    assert table.rich_table([row([1])]).row_count == 1


def run_of(rows, **fields):
    given = {
        "began": datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc),
        "revision": "abc1234567",
        "is_dirty": False,
        "machine": {"cores": 2},
        "versions": {"python": "3"},
        "settings": {"quick": True},
    }
    return results.Run(rows=rows, **{**given, **fields})


def test_a_run_is_written_as_json_that_holds_every_sample(tmp_path):
    rows = [row([1.23456, 2], [4], target=AtMost(1)), row([0])]
    path = results.save(run_of(rows), tmp_path / "results")
    assert path.name == "2026-01-02-abc1234567.json"
    read = json.loads(path.read_text())
    assert read == run_of(rows).plain()
    first, second = read["rows"]
    assert first["ours"]["samples"] == [1.235, 2]
    assert (first["met"], first["target"], first["versus"]) == (False, "<= 1", "stock")
    assert (second["reference"], second["ratio"], second["met"]) == (None, None, None)


def test_a_changed_checkout_shows_in_the_name_of_the_file():
    assert run_of([], is_dirty=True).file_name.endswith("-abc1234567-dirty.json")


def test_a_timed_call_takes_turns_and_drops_the_first_sample():
    order = []
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    samples = each_us(calls, 3)
    assert [len(found) for found in samples] == [3, 3]
    assert order == ["a", "b"] * 4
    assert len(per_call_us(lambda: None, 2)) == 2


def test_texts_and_numbers_are_never_given_twice(tmp_path):
    bench = Bench(num_rounds=1, is_quick=True, work=tmp_path, step=lambda _: None)
    texts = [bench.text(1) for _ in range(250)]
    texts += [bench.short_text() for _ in range(250)]
    assert len(set(texts)) == 500
    lengths = [len(text) for text in texts[:250]]
    assert max(lengths) - min(lengths) <= 8
    assert bench.text(3).count(".") == 3


def test_clips_are_what_the_server_accepts_and_unlike_each_other():
    first, again, other = clip(1.5, 1), clip(1.5, 1), clip(1.5, 2)
    audio = decode(first).audio
    assert (audio.sample_rate_hz, audio.num_samples) == (SAMPLE_RATE_HZ, 66_150)
    assert audio.audio_sha256 == decode(again).audio.audio_sha256
    assert audio.audio_sha256 != decode(other).audio.audio_sha256
    assert decode(first).warnings == ()


def test_the_servers_find_the_float32_plugin_and_no_other_process_does(tmp_path):
    float32_encoders.write_metadata(tmp_path)
    program = (
        "import sys; from importlib.metadata import entry_points as e;"
        "print([p.value for p in e(group='vllm_omni.general_plugins')]);"
        # In a process that is no worker there is nothing to do, nor to import.
        "from benchmarks import float32_encoders as f; f.register();"
        "print('host imported:', any(m.startswith('vllm_omni') for m in sys.modules))"
    )
    seen = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "benchmarks.float32_encoders:register" in seen.stdout
    assert "host imported: False" in seen.stdout


def test_scenarios_have_names_of_their_own():
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names) == 5
