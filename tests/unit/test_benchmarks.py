import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from benchmarks import (
    churn_process,
    estimate,
    fresh_process,
    plots,
    profiles,
    results,
    server_plugins,
    start_process,
    table,
)
from benchmarks.__main__ import ROUNDS, main
from benchmarks.bench import Bench
from benchmarks.clips import SAMPLE_RATE_HZ, clip
from benchmarks.estimate import Seconds
from benchmarks.many_voices import speaker_name, write_ours, write_stock
from benchmarks.models import FISH_SPEECH, MODELS, QUICK_MODELS, QWEN3_TTS
from benchmarks.rows import AtLeast, AtMost, RatioAtMost, Row, Summary, percentile
from benchmarks.runner import SCENARIOS, Plan, Scenario, of_model, run
from benchmarks.sides import open_sides
from benchmarks.timing import each_us, per_call_us
from vllm_tts_cache.audio.decode import decode
from vllm_tts_cache.catalogue.stock_import import import_stock_directory
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.storage import open_storage

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


def test_a_floor_is_met_down_to_and_including_it():
    assert row([85.0], target=AtLeast(85)).is_met is True
    assert row([84.9], target=AtLeast(85)).is_met is False
    assert ">= 85" in table.cells(row([85.0], target=AtLeast(85)))


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
    missed = row([3, 3], [1, 1], target=RatioAtMost(2.0), note="n", model="m")
    text = table.markdown([missed])
    heading, rule, line = text.splitlines()
    assert heading.count("|") == rule.count("|") == line.count("|")
    assert line == "| s | m | w (n) | ms | 3.00 (0) | 1.00 (0) | 3.00 | <= 2x | NO |"


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


def test_the_servers_find_their_plugins_and_no_other_process_does(tmp_path):
    modules = [
        module
        for model in MODELS
        for module in (*model.server_plugins, *model.stock.server_plugins)
    ]
    assert len(set(modules)) == 3
    server_plugins.announce(tmp_path, modules)
    program = (
        "import sys; from importlib.metadata import entry_points;"
        "found = entry_points(group='vllm_omni.general_plugins');"
        "ours = [e for e in found if e.value.startswith('benchmarks.')];"
        "print([e.value for e in ours]);"
        # In a process that is no worker there is nothing to do, nor to import.
        "[e.load()() for e in ours];"
        "print('host imported:', any(m.startswith('vllm_omni') for m in sys.modules))"
    )
    seen = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str([f"{module}:register" for module in modules]) in seen.stdout
    assert "host imported: False" in seen.stdout


def test_scenarios_have_names_of_their_own_and_say_how_long_they_take():
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names) == 10
    assert all(scenario.full.total(ROUNDS) > 0 for scenario in SCENARIOS)


def plan_of(*, is_quick, models=(QWEN3_TTS,)):
    scenarios = [s for s in SCENARIOS if s.quick or not is_quick]
    return Plan(
        scenarios=scenarios,
        models=models,
        num_rounds=1,
        is_quick=is_quick,
        work=Path(),
    )


def test_every_model_adds_its_servers_and_what_runs_beside_them():
    one, two = (plan_of(is_quick=False, models=MODELS[:n]) for n in (1, 2))
    ((_, added),) = [pair for pair in two.served if pair not in one.served]
    more = [estimate.SERVERS, *(scenario.full for scenario in added)]
    assert two.parts() == [*one.parts(), *more]


def test_a_scenario_runs_only_where_it_says_something():
    beside = {
        model.name: [scenario.name for scenario in scenarios]
        for model, scenarios in plan_of(is_quick=False, models=MODELS).served
    }
    qwen, fish = beside[QWEN3_TTS.name], beside[FISH_SPEECH.name]
    assert {"concurrent_cold", "cold_bystander"} == set(qwen) - set(fish)
    assert {"kv_prefix"} == set(fish) - set(qwen)
    # It leaves ours with another setting.
    assert qwen[-1] == fish[-1] == "first_request"


def test_a_scenario_that_fails_costs_only_its_own_rows(tmp_path, capsys):
    def fail(_bench):
        raise RuntimeError("no audio")

    def scenario(name, measure):
        return Scenario(
            name=name, run=measure, needs_servers=False, full=Seconds(1), quick=None
        )

    good = row([1.0])
    outcome = run(
        Plan(
            scenarios=[scenario("bad", fail), scenario("good", lambda _: [good])],
            models=(),
            num_rounds=1,
            is_quick=False,
            work=tmp_path,
        )
    )
    assert outcome.rows == [good]
    assert outcome.failures == ["bad: no audio"]
    assert "Traceback" in capsys.readouterr().err


API, STAGE = 'process 12:"vllm serve"', 'process 12:"vllm serve";process {}:"stage"'
STACKS = f"""\
{API};main (threading.py:1);run (vllm_omni/api.py:3);read (io.py:9) 5
{API};main (threading.py:1);find (vllm_tts_cache/a/service.py:115) 2
{API};run (vllm_omni/api.py:7);<lambda> (vllm/u.py:1);poll (x.py) 1
{API};main (threading.py:1);select (selectors.py:468) 4
{STAGE.format(99)};go (vllm/core.py:5);forward (vllm_omni/m/qwen3_tts_talker.py:8) 7
{STAGE.format(100)};go (vllm/core.py:5);conv (torch/nn.py:2) 3
"""


def test_a_profile_counts_a_sample_for_the_innermost_function_of_known_owners():
    found = profiles.read(STACKS)
    assert found == {
        "API": {
            ("vLLM-Omni", "run (api.py)"): 5,
            ("ours", "find (a/service.py)"): 2,
            ("vLLM", "<lambda> (u.py)"): 1,
            ("libraries", "event loop, HTTP, threads of libraries"): 4,
        },
        "talker": {("vLLM-Omni", "forward (m/qwen3_tts_talker.py)"): 7},
        "other stages": {("vLLM", "go (core.py)"): 3},
    }


def test_a_model_that_no_scenario_serves_starts_no_server():
    cold = [s for s in SCENARIOS if s.name == "cold_bystander"]
    plan = Plan(
        scenarios=cold, models=[FISH_SPEECH], num_rounds=1, is_quick=False, work=Path()
    )
    assert (plan.served, plan.parts()) == ([], [])


def test_what_stock_was_changed_by_is_said_beside_its_figures_only():
    note = FISH_SPEECH.stock.note
    rows = [row([1], [2], note="n"), row([1]), row([1], [2], versus="ours, first")]
    shown = [of_model(one, FISH_SPEECH) for one in rows]
    assert [one.note for one in shown] == [f"n; {note}", "", ""]
    assert {one.model for one in shown} == {FISH_SPEECH.name}
    assert of_model(rows[0], QWEN3_TTS).note == "n"


def test_stock_and_ours_differ_in_what_the_table_says_they_do(tmp_path):
    FISH_SPEECH.family.write_checkpoint(tmp_path / "checkpoint-fish-speech")
    folders = [
        tmp_path / f"fish-speech-{s.name}" for s in open_sides(FISH_SPEECH, tmp_path)
    ]
    stock, ours = (json.loads((f / "deploy.yaml").read_text()) for f in folders)
    assert stock.pop("stages") == [{"stage_id": 0, "enable_prefix_caching": False}]
    assert stock == ours
    announced = [
        next(f.glob("plugin/*.dist-info/entry_points.txt")).read_text() for f in folders
    ]
    assert ["small_codec" in text for text in announced] == [True, False]


def test_a_quick_run_is_meant_to_take_less_than_five_minutes():
    parts = plan_of(is_quick=True, models=QUICK_MODELS).parts()
    assert sum(part.total(2) for part in parts) <= 300
    assert estimate.in_words([Seconds(60), Seconds(30, 30)], 7).startswith(
        "about 5 min"
    )


def drawn(rows, folder):
    result = results.save(run_of(rows), folder)
    return plots.draw(result, folder / "plots")


def test_every_scenario_is_drawn_to_the_same_small_picture(tmp_path):
    samples = [[v * (i + 1) for v in (1.0, 2.0, 4.0)] for i in range(12)]
    rows = [
        row(s, [3 * v for v in s], what=f"w{i}", target=AtMost(5), scenario=name)
        for i, s in enumerate(samples)
        for name in ("first", "second")
    ]
    # Nothing measured, far apart, another reference, another unit, a ratio.
    rows += [
        row([0.0], scenario="second", unit="encodes", target=AtMost(0)),
        row([1e-3], [1e6], scenario="second", target=RatioAtMost(1.0)),
        row([90.0], [0.0], scenario="second", unit="%", target=AtLeast(85)),
        row([1.0], [2.0], scenario="second", versus="plain read"),
    ]
    (tmp_path / "again").mkdir()
    once, again = drawn(rows, tmp_path), drawn(rows, tmp_path / "again")
    assert [path.name for path in once] == ["first.png", "second.png"]
    assert [p.read_bytes() for p in once] == [p.read_bytes() for p in again]
    assert all(100 < path.stat().st_size < 60_000 for path in once)


def test_another_figure_is_another_picture(tmp_path):
    (tmp_path / "b").mkdir()
    (a,) = drawn([row([1.0, 2.0], [3.0])], tmp_path)
    (b,) = drawn([row([1.5, 2.0], [3.0])], tmp_path / "b")
    assert a.read_bytes() != b.read_bytes()


def test_drawing_starts_no_measurement(tmp_path, capsys):
    result = results.save(run_of([row([1.0])]), tmp_path)
    out = tmp_path / "pictures"
    assert main(["--plots", str(result), "--plots-out", str(out)]) == 0
    assert [path.name for path in out.iterdir()] == ["s.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [result.name, "pictures"]


def test_churn_stays_within_its_budget_and_leaves_nothing(tmp_path):
    budget = 4 * 1024**2
    found = fresh_process.run(churn_process.__name__, tmp_path / "d", 300, budget)
    assert 0 < found["largest_memory_bytes"] <= budget
    assert found["evictions"] > 0
    assert found["in_place_encodes"] == 0
    assert {what: n for what, n in found["left"].items() if n > 0} == {}


def test_a_failed_process_is_an_error_that_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="num_operations"):
        fresh_process.run(churn_process.__name__, tmp_path)


def test_synthetic_voices_are_found_listed_and_recovered(tmp_path):
    write_ours(tmp_path / "many", 250)
    given = ("ours", tmp_path / "many", "--follow", "--starts", 2)
    found = fresh_process.run(start_process.__name__, *given)
    assert len(found["start_ms"]) == 2 and found["page_ms"] > 0
    storage = open_storage(Settings(samples_dir=tmp_path / "many"))
    assert storage.registry.count() == 250
    assert storage.registry.get(speaker_name(249)) is not None
    assert len(list(storage.audio.iter_registered())) == 250  # recovery took none
    storage.registry.close()


def test_synthetic_voices_of_stock_are_what_stock_writes(tmp_path):
    write_stock(tmp_path / "stock", 3)
    storage = open_storage(Settings(samples_dir=tmp_path / "ours"))
    report = import_stock_directory(
        tmp_path / "stock", storage.registry, lambda *_: "0" * 64
    )
    assert report.imported == [speaker_name(n) for n in range(3)]
    assert report.skipped == []
    storage.registry.close()
