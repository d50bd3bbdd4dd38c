import json
from datetime import UTC, datetime
from itertools import pairwise

import pytest

from benchmarks import plots, report
from benchmarks.__main__ import main
from benchmarks.measure import AtLeast, AtMost, Point, RatioAtMost, Row, Summary


def row(ours, reference=None, **fields):
    stock = None if reference is None else Summary.of(reference)
    return Row(
        fields.pop("what", "w"),
        fields.pop("unit", "ms"),
        Summary.of(ours),
        stock,
        **{"scenario": "s", **fields},
    )


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
    assert report.number(value) == shown


def test_a_missed_target_stays_in_the_table():
    missed = row([3, 3], [1, 1], target=RatioAtMost(2.0), note="n", model="m")
    text = report.markdown([missed])
    heading, rule, line = text.splitlines()
    assert heading.count("|") == rule.count("|") == line.count("|")
    assert line == "| s | m | w (n) | ms | 3.00 (0) | 1.00 (0) | 3.00 | <= 2x | NO |"


def test_another_reference_than_stock_is_named():
    (cells,) = [report.cells(row([1], [2], versus="plain read"))]
    assert "plain read: 2.00 (0)" in cells
    assert report.rich_table([row([1])]).row_count == 1


def test_a_floor_is_shown_as_one():
    assert ">= 85" in report.cells(row([85.0], target=AtLeast(85)))


def test_a_row_says_why_stock_has_no_figure():
    assert "- (it has no queue)" in report.cells(row([1], no_stock="it has no queue"))
    assert "" in report.cells(row([1]))


def run_of(rows, **fields):
    given = {
        "began": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "revision": "abc1234567",
        "is_dirty": False,
        "machine": {"cores": 2},
        "versions": {"python": "3"},
        "settings": {"quick": True},
    }
    return report.Run(rows=rows, **{**given, **fields})


def test_a_run_is_written_as_json_that_holds_every_sample(tmp_path):
    rows = [row([1.23456, 2], [4], target=AtMost(1)), row([0])]
    path = report.save(run_of(rows), tmp_path / "results")
    assert path.name == "2026-01-02-abc1234567.json"
    read = json.loads(path.read_text())
    assert read == run_of(rows).plain()
    first, second = read["rows"]
    assert first["ours"]["samples"] == [1.235, 2]
    assert (first["met"], first["target"], first["versus"]) == (False, "<= 1", "stock")
    assert (second["reference"], second["ratio"], second["met"]) == (None, None, None)


def test_a_changed_checkout_shows_in_the_name_of_the_file():
    assert run_of([], is_dirty=True).file_name.endswith("-abc1234567-dirty.json")


def test_a_row_is_written_with_its_place_in_a_picture(tmp_path):
    rows = [row([1], point=Point("scale", "start, ours", 10)), row([2])]
    path = report.save(run_of(rows), tmp_path)
    drawn, other = json.loads(path.read_text())["rows"]
    assert drawn["point"] == {"picture": "scale", "line": "start, ours", "at": 10}
    assert other["point"] is None


PICTURES = ["clients", "cost", "gaps", "scale"]


def whole(scale=1.0):
    """Rows of every picture."""
    rows = [
        row([cost * at], [40.0 * at], point=Point("cost", f"{model} {field}", at))
        for model, cost in (("one", 0.1), ("two", 0.2))
        for field in ("cpu_ms", "engine_bytes")
        for at in (3, 10, 30)
    ]
    gaps = [scale * (100 + number) for number in range(300)]
    rows += [
        row(gaps, gaps[::-1], point=Point("gaps", "quiet")),
        row(gaps, [9 * gap for gap in gaps], point=Point("gaps", "while others come")),
    ]
    for at in (10, 1_000, 100_000):
        rows.append(row([3.0], point=Point("scale", "start, ours", at)))
        rows.append(row([0.1], point=Point("scale", "look-up p99, ours", at)))
    rows.append(row([3.0], [150.0], point=Point("scale", "start, stock", 1_000)))
    rows += [
        row([0.5 * at], [0.1 * at], point=Point("clients", f"voice {field}", at))
        for field in ("per_second", "first_ms")
        for at in (1, 4, 16)
    ]
    return rows


def drawn(rows, folder):
    return plots.draw(report.save(run_of(rows), folder), folder / "plots")


def test_each_question_is_drawn_to_the_same_small_picture(tmp_path):
    (tmp_path / "again").mkdir()
    once, again = drawn(whole(), tmp_path), drawn(whole(), tmp_path / "again")
    assert [path.stem for path in once] == PICTURES
    assert [p.read_bytes() for p in once] == [p.read_bytes() for p in again]
    assert all(1_000 < path.stat().st_size < 60_000 for path in once)


def test_another_figure_is_another_picture(tmp_path):
    (tmp_path / "b").mkdir()
    a, b = drawn(whole(), tmp_path), drawn(whole(scale=2.0), tmp_path / "b")
    same = [x.read_bytes() == y.read_bytes() for x, y in zip(a, b, strict=True)]
    assert same == [name != "gaps" for name in PICTURES]


def test_a_run_without_a_pictures_rows_leaves_it_out(tmp_path):
    assert drawn([row([1.0])], tmp_path) == []
    rows = [one for one in whole() if one.point.picture == "gaps"]
    assert [path.name for path in drawn(rows, tmp_path)] == ["gaps.png"]


def test_drawing_starts_no_measurement(tmp_path):
    result = report.save(run_of(whole()), tmp_path)
    out = tmp_path / "pictures"
    assert main(["--plots", str(result), "--plots-out", str(out)]) == 0
    assert sorted(path.stem for path in out.iterdir()) == PICTURES


def test_very_many_samples_are_thinned_to_even_ranks_with_both_ends():
    few = [3.0, 1.0, 2.0]
    assert report.thinned(few) == few
    thin = report.thinned([float(n) for n in range(10_000)][::-1])
    assert (len(thin), thin[0], thin[-1]) == (report.MAX_SAMPLES, 0.0, 9_999.0)
    steps = [b - a for a, b in pairwise(thin)]
    assert max(steps) - min(steps) <= 1
